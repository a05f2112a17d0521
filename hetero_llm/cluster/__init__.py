"""The only Ray code: session, nodes, device leases, replicas, registry, scheduler actor."""

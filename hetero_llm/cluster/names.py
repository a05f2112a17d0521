"""Names that several processes must agree on."""

NAMESPACE = "hetero-llm"
"""Ray namespace of our own actors."""

SCHEDULER = "hetero-llm-scheduler"
"""Name of the scheduler actor."""

GATEWAY_APP = "hetero-llm-gateway"
"""Serve application of the gateway."""

LEASE_PERIOD_S = 0.5
"""How often a replica renews its lease with the scheduler."""

LEASE_LATE_S = 1.5
"""A lease this old makes the scheduler ask Ray whether the actor still lives."""

HEAD_RESOURCE = "node:__internal_head__"
"""Ray's own resource of the head node, 1 there and nowhere else."""

ON_HEAD = {HEAD_RESOURCE: 0.001}
"""What keeps an actor on the head: the scheduler, so that no other node's end takes it away, and the gateway, so that
clients find it where they were told."""

"""The only Ray code: session, nodes, device leases, replicas, registry, scheduler actor."""

import os as _os

# Ray reads the mode when it is imported, and by itself turns it on in some ways of joining and not in others.
# Clusters started here always have a token; RAY_AUTH_MODE=disabled joins a foreign one without.
_os.environ.setdefault("RAY_AUTH_MODE", "token")
_os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Otherwise Ray clears accelerator variables of actors that ask for no GPU.
_os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray asks every node for a sign of life each 3 s and gives one up after five failures. A busy node answers late, which
# counts after 10 s only; a dead one refuses at once, and this is how soon it is known to be gone.
_os.environ.setdefault("RAY_health_check_period_ms", "1000")
# Ray starts workers at niceness 15, and engines and the gateway would inherit it.
_os.environ.setdefault("RAY_worker_niceness", "0")

"""Bounds of the control socket, and of the scripts that use it."""

CONTROL_BACKLOG = 64
"""Connections that wait to be accepted. A script that comes later waits as well."""

CONTROL_DIAL_S = 10.0
"""How long a script waits for the owner to accept a connection: a busy owner takes milliseconds."""

CONTROL_PROGRESS_S = 5.0
"""The longest silence of long work: it keeps the connection from looking dead."""

CONTROL_POLL_S = 0.5
"""How often a replica beside the owner asks for its `upper`, at the cost of one small call."""

CONTROL_END_S = 1.0
"""How long `close` waits for calls under way. They are short, or end at their next step."""

CONTROL_TRIES = 3
"""How often a script looks for the owner of a store, which may open or close it meanwhile."""

CONTROL_TRY_S = 0.1
"""The time between two of these looks."""

CONTROL_LEASE_S = 604_800.0
"""Age of the hold of a first backup, or of a first copy, beside an owner. One that was killed, and
is never repeated, keeps history for a week. A first backup that takes longer has to begin anew."""

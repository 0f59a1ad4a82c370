"""A store behind the interfaces of other tools: arrays, file systems, agents, caches, queues.

Each module implements the interface of one foreign package, and is the only module that imports it;
the extra of the same name installs it. What an adapter stores are ordinary keys below a prefix, so
history, reads as of a time, feeds and backups work on them. `kvstore.remote.handle` reaches the
store. No rule of storage lives here.
"""

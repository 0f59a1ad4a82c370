"""The same store from other processes: a server and its clients, scripts beside the owner, live
readers.

`verbs` declares what a server does, once for client, server and document; it is the place to begin
with a new verb. `protocol` is how bytes, errors and rows travel. `kvstore.server` has the public
names of the server.
"""

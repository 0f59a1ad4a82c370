"""The same store from other processes: a server and its clients, scripts beside the owner, live
readers.

`protocol` is the language of server and client; `parameters` and `results` declare the arguments
and answers of each verb. `kvstore.server` has the public names of the server.
"""

"""A client of a store that another process serves, with the names of `Store`.

Floors, from the top:

    connecting            `kvstore.connect`: a URL or a path becomes a client
    asynchronous          the client for asyncio
    async_capture async_snapshots async_tables    its calls of changes, snapshots and tables
    threads               where its calls wait
    client
    snapshots upkeep      reads at one time; what the owner does for callers with the right `admin`
    capture               changes, and the groups of commits
    changesets feeds holds metrics transactions
    tables                rows of tables, encoded here
    table_joins work      labels, joined with a table by the server; long work of the owner
    frontiers joins       its times; labels, answered by the server
    streams events        rows as they arrive; rows that are changes
    pool                  idle connections, and attempts
    calls connection      requests without a socket; HTTP/1.1 on one socket
    endpoint reply tasks  where a server is; an answer, parsed; tasks for its queue
    writes                the writes of a batch, until they are sent
"""

from kvstore.remote.client.asynchronous import AsyncClient
from kvstore.remote.client.client import Client
from kvstore.remote.client.connecting import connect, connect_async

__all__ = ["AsyncClient", "Client", "connect", "connect_async"]

"""The bounds of a server and of its clients."""

SERVER_BODY_BYTES_MAX = 64 << 20
"""Bytes of one request: a batch of that size is written in less than a second."""

SERVER_MEMORY_BYTES_MAX = 256 << 20
"""Bytes of the requests that a server is reading or doing at one time, all clients together."""

SERVER_HEAD_BYTES_MAX = 32 << 10
"""Bytes of a request's line and headers. A key of 8 KiB fits when each byte is percent-encoded;
clients send longer keys in bodies."""

SERVER_CONNECTIONS_MAX = 1000
"""Connections at one time. An idle one costs a descriptor and some 20 KiB."""

SERVER_TURNED_AWAY_MAX = 100
"""Connections above `SERVER_CONNECTIONS_MAX` that are told so. Further ones are cut at once."""

SERVER_TURNED_AWAY_S = 1.0
"""Seconds in which such a connection must have read that the server is full. Its request is thrown
away meanwhile: closing at once would have the kernel throw the answer away."""

SERVER_REQUEST_S_MAX = 30.0
"""Seconds in which the head of a request must have arrived, and in which a client must take some of
its answer."""

SERVER_BYTES_S_MIN = 16 << 10
"""Bytes a second at which a body must have come, and an answer must be taken, beside
`SERVER_REQUEST_S_MAX` seconds. A client that moves a byte now and then would keep its memory."""

SERVER_UNSENT_BYTES_MAX = 512 << 20
"""Bytes of memory for large answers that clients have not taken, all clients together: twice the
parts of `SERVER_STREAMS_MAX` streams whose rows fit into `ARROW_BYTES_MAX`."""

SERVER_ROW_COPIES = 5
"""How often a row that fills a large part is in memory while its client reads: as the part, and in
the scan as the bytes of the engine, their copy and the columns. Sixty scans of rows of 16 MiB took
84 MB each."""

SERVER_PIECE_BYTES = 128 << 10
"""Bytes of an answer that a transport gets at once. Smaller answers do not count for
`SERVER_UNSENT_BYTES_MAX`: a thousand clients could keep 128 MiB of them, and 512 MiB over TLS."""

SERVER_LARGE_PART_BYTES = 8 << 20
"""Bytes above which a part of a stream is large. It is one row then, for several rows of a scan or
of an answer fit into `ARROW_BYTES_MAX`; an index may find several, larger than those before. The
part behind a large one is made once the client has taken it; behind others it is made meanwhile."""

SERVER_PIPELINED_MAX = 64
"""Requests that wait behind another one of their connection, 3 KiB each. A client that sends
more at once, and reads no answer, is cut."""

SERVER_IDLE_S_MAX = 75.0
"""Seconds for which a connection may stay idle between two requests."""

SERVER_STREAMS_MAX = 64
"""Answers of many rows that are under way at one time. Each keeps history, and two batches in
memory."""

SERVER_THREADS_MAX = 16
"""Threads of a server that wait for the store. Two cores are busy with four; the others wait for
the disk."""

SERVER_MAKERS_MAX = 4
"""Threads that make answers of many rows. Two cores are busy with them, and each has an answer's
part in memory some three times."""

SERVER_STREAM_ROWS = 16_384
"""Rows of a batch of a streamed answer: larger than a scan's own, for each costs three system
calls."""

JSON_ROWS_MAX = 10_000
"""Rows of an answer as JSON, which is made in memory. Arrow has no such bound."""

JSON_ANSWER_BYTES_MAX = 16 << 20
"""Bytes of the rows behind which such an answer ends. As Python objects and as text they take some
ten times as much."""

JSON_ITEM_BYTES = 80
"""Bytes of memory that an item of JSON takes in a request: an empty object, and its place. They
count for `SERVER_MEMORY_BYTES_MAX`."""

CLIENT_CONNECTIONS_MAX = 32
"""Idle connections that a client keeps: as many threads may call at once without a new one."""

CLIENT_TIMEOUT_S = 60.0
"""Seconds for which a client waits for the next bytes of a server."""

CLIENT_TIMEOUT_S_MIN = 0.001
"""The shortest such wait: a socket takes less than a microsecond for no bound at all."""

CLIENT_TIMEOUT_S_MAX = 2_000_000.0
"""The longest such wait, 23 days: a socket counts milliseconds in 31 bits."""

CLIENT_PATIENCE_S = 10.0
"""Seconds for which a client sends a request again that was surely not done, or that the server
does once however often it arrives."""

CLIENT_RETRY_S = 0.05
"""Seconds before the second attempt of a request; twice as long before each later one."""

CLIENT_URL_KEY_BYTES_MAX = 4096
"""Bytes of a key in a URL. Longer keys travel in bodies."""

CLIENT_HEAD_BYTES_MAX = 64 << 10
"""Bytes of the head of an answer."""

SERVER_BACKLOG = 1024
"""Connections that the kernel accepts before the server does."""

SERVER_SHORT_BYTES_MAX = 64 << 10
"""Bytes of a request that is done on the event loop, and of an answer that is sent without a watch
on its time. A thread for it would cost 200 us; a commit of this size takes half of that."""

SERVER_WAITS_MAX = 64
"""Consumers of feeds that wait for a change at one time, each in a thread."""

READER_LEASE_S_MAX = 24 * 3600.0
"""Seconds for which a reader of another machine keeps history without taking its lease again. A
reader that is gone keeps it for no longer."""

CLIENT_SNAPSHOT_LEASE_S = 3600.0
"""Seconds for which a snapshot of a client keeps history without a read."""

READER_LEASES_MAX = 1000
"""Leases of readers at one time. Each is a record of some 200 bytes."""

SERVER_CHANGESET_S = 300.0
"""Seconds for which a changeset of a client stays open without a write. Epochs and
`force_quiescence` wait for open changesets, so a client that has gone holds them back for no
longer."""

SERVER_CHANGESETS_MAX = 1000
"""Changesets of clients that are open at one time. Each takes some 500 bytes."""

READER_TRIES_MAX = 5
"""Times that a reader asks for the rest of a stream that broke, without a new row in between. Each
waits for `CLIENT_PATIENCE_S` where nobody answers."""

FEED_POLL_S_MAX = 10.0
"""Seconds for which one fetch of a feed waits for a change: a consumer that has gone costs a thread
for no longer."""

SERVER_READERS_MAX = 64
"""Reader processes behind one port. Each follows the store and costs some 60 MB of memory."""

SERVER_READER_STALENESS_S = 0.05
"""Seconds between two looks of a reader process that nobody asks. A read looks first."""

SERVER_READER_START_S = 60.0
"""Seconds in which a reader process must be ready: 1 s on an idle machine."""

SERVER_READER_PAUSE_S = 0.1
"""Seconds before a reader process that failed is started again; twice as long after each failure in
a row, up to `SERVER_READER_PAUSE_S_MAX`."""

SERVER_READER_PAUSE_S_MAX = 10.0
"""Longest pause before a reader process is started again, in seconds."""

SERVER_ACCEPT_PAUSE_S = 0.5
"""Seconds for which a reader process accepts no connection after it ran out of descriptors."""

SERVER_READER_GRACE_S = 5.0
"""Seconds in which a reader process ends before it is killed, beside the time for requests under
way."""

BROWSE_ROWS_MAX = 100
"""Rows of one page that a person looks at."""

BROWSE_ENTRIES_MAX = 8192
"""Entries that a page of keys passes: some 10 ms. A longer run of dead entries cuts the page."""

BROWSE_CHUNK = 128
"""Entries that a page of keys reads at once; an eighth of them to pass over a group of keys."""

BROWSE_BYTES_MAX = 32 << 20
"""Bytes of values that a page reads. A larger value is read whole by RocksDB, and cuts the page."""

BROWSE_VALUE_BYTES = 16 << 10
"""Bytes of a value that a page shows, compares and keeps."""

BROWSE_REFERENCES_MAX = 1000
"""Rows of imports that a page of versions reads of one key."""

BROWSE_PARTS = 8
"""Parts of an interval, each of which is counted or estimated: a burst spoils one of them."""

BROWSE_HEADERS_MAX = 50
"""Entries of the change index that a part of an interval counts. Behind them it is estimated."""

BROWSE_SEEKS_MAX = 2048
"""Streams that a window of changes looks into, over all of its intervals."""

BROWSE_INTERVALS_MAX = 240
"""Intervals of one window of changes."""

COLLECTIONS_TOLD = 100
"""Runs of GC that a store remembers for its page: a record of 10 kB at most."""

BROWSE_MARKS_MAX = 200
"""Marks of one window of changes."""

BROWSE_KEY_BYTES_MAX = 2048
"""Bytes of a key that a link of the page carries. Four characters a byte, each percent-encoded,
stay below `SERVER_HEAD_BYTES_MAX`."""

PAGE_FORM_BYTES_MAX = 32 << 10
"""Bytes of a form that the page takes."""

PAGE_DIFFERENCE_LINES_MAX = 200
"""Lines of each of two values that are compared. The time grows with their product."""

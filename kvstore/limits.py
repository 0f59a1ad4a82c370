"""Every bound in one place, each with its reason.

A module says `from kvstore.limits import X` and reads `X` inside its functions, so that a test can
set a bound for a while. The bounds of a store come first, then those of servers and clients, of the
socket of a store, and of backup collections.
"""


# --------------------------------------------------------------------------------------------------
# The bounds of a store, and of the bulk loads that fill it.

KEY_BYTES_MAX = 64 * 1024
"""Bytes of a user key. RocksDB copies keys into indexes and blocks, so they must stay short."""

VALUE_BYTES_MAX = 1 << 30
"""Bytes of a value. RocksDB's own limit is 4 GiB, an Arrow binary column's 2 GiB."""

BATCH_BYTES_MAX = 1 << 30
"""Keys and values of one atomic batch: it is held in memory, and again in the memtable."""

CHANGE_CHUNK_BYTES = 4 << 20
"""Payload of one change entry. A larger commit is cut, which bounds a reader's memory."""

COMMIT_PIECE_BYTES = 1 << 20
"""Keys and values of a commit from which on it goes to the engine in pieces, and of one such piece.
The engine keeps the interpreter for the whole of a batch: 0.1 us a KB, and 0.5 us a row."""

COMMIT_PIECE_ROWS = 2048
"""Rows of one such piece: other threads of the process wait for 1 ms."""

INLINE_VALUE_BYTES = 1024
"""Values up to this size travel in the change index; larger ones are read from the versions."""

THIN_FROM_BYTES = 64 << 10
"""Bytes of values from which on a change entry is logged without its values, which the log has
already. A further write then stores the full entry, which costs 15 us: smaller entries are logged
whole."""

COMPRESS_FROM_BYTES = 16_384
"""Bodies of change entries below this stay uncompressed: a cold call of the codec takes 20 us."""

INDEX_ENTRIES_PER_TAKE = 64
"""Small change entries that a reader of the index takes at once. Large ones come one by one."""

WHOLE_ROWS_MIN = 512
"""Rows from which on a change entry becomes a record batch of its own. Smaller entries share a
batch, because each batch costs 40 us."""

REBUILD_FRAGMENTS_FROM = 65
"""Range tombstones of one commit from which on rebuilding a small map beats adding each."""

STRETCHES_MAX = 64
"""Boundaries in a leaf of the map of range tombstones, and nodes in a branch of it: a write copies
one node of each depth. Two at least."""

VERSIONS_PASSED_MAX = 32
"""Versions of one key that a scan passes one by one: a seek takes as long as some thirty entries.
One at least."""

STEPS_BEFORE_SEEK = 8
"""Entries that a walk passes one by one before it seeks, which takes as long as some eight."""

JOIN_ROWS_FIRST, JOIN_ROWS_MAX = 1 << 14, 1 << 20
"""Labels of a join's first walk, which tells how large values are, and of later ones. Many labels
lie closely; each takes some 80 bytes."""

JOIN_PASS_LABELS_MIN, JOIN_PASS_BYTES_MAX = 2048, 512
"""Labels from which on a join may read the sorted files itself, and the bytes of files for each
label up to which it does. Otherwise a walk that steps and seeks is faster."""

JOIN_SPAN_FACTOR = 8
"""How many times as many bytes of files a label of an event time may have: it is answered in Python
otherwise."""

HISTORY_BYTES_MAX = 64 << 20
"""Bytes of the values that one answer of a server has of the versions of a key."""

JOIN_LABEL_BYTES_MAX = JOIN_VALUE_BYTES_MAX = 64 << 20
"""Bytes of the labels of a walk with all their columns, and of their values."""

ARROW_ROWS_MAX = 16_384
"""Rows of one record batch: large enough to amortise Arrow, small enough to stay in cache."""

ARROW_BYTES_MAX = 4 << 20
"""Bytes of one record batch, or one row that is larger. Making a batch of them takes milliseconds,
its own cost is far below that, and a server has one for each stream in memory."""

JSON_BYTES_MAX = 64 << 20
"""Bytes of one JSON record or manifest. The largest kind, the manifest of an import, has 300 bytes
and two keys for each part. Parsing hostile JSON takes twenty times its size of memory."""

JSON_DEPTH_MAX = 64
"""Depth of nested brackets in JSON. Our records nest five deep; any stack can hold 64."""

INGEST_FLUSH_BYTES = 1 << 20
"""Bytes of commits in memory from which on an import first writes them to a file. RocksDB writes
fewer in 2 ms, when it takes the import's files."""

JOURNAL_RECORD_BYTES_MAX = 2 << 30
"""Payload of one journal record: an atomic batch and room for its framing."""

JOURNAL_FILE_BYTES = 64 << 20
"""Size at which a journal file is closed. Closing one costs four fsyncs."""

JOURNAL_FILE_RECORDS = 1 << 20
"""Records at which a journal file is closed: bounds the search for an ordinal in a file."""

JOURNAL_SECTOR_BYTES = 512
"""Bytes of a sector, the unit that a disk writes whole or not at all; no disk has smaller ones. A
power cut leaves each unsynced sector in its newest or an older state, independently."""

JOURNAL_READ_BYTES = 256 << 10
"""Bytes that a journal reader takes at once. All records of such a piece stay in the cache."""

JOURNAL_COMPACT_BYTES = 16 << 20
"""Journal bytes behind the newest snapshot from which on opening writes a new snapshot."""

CHUNK_ENTRIES_MAX = 1024
"""Entries of one chunk of the memory engine. A write beside an open cursor copies the root and one
chunk; with a million entries both are then about equally long, which makes the copy least."""

MEMORY_BATCH_IN_PLACE_MAX = 1024
"""Operations that the memory engine writes in place while readers wait, for a millisecond."""

MEMORY_RECORD_BYTES = 1 << 20
"""Payload of one journal record of an ingest or a snapshot of the memory engine."""

BLOCK_BYTES = 8 << 10
"""Bytes of a RocksDB block, the unit of reading, caching and checking. In 300,000 rows sorted
look-ups take 0.74 of their time with RocksDB's default of 4 KiB, scans 0.92, single look-ups 1."""

PACKED_STRETCH_BYTES = 1 << 20
"""Bytes of the blocks of a sorted file that one thread packs at once, and that are written at once.
From 64 KiB to 1 MiB no size was clearly better, on a machine with other work."""

PACKING_THREADS_MAX = 4
"""Threads that pack the blocks of one sorted file at once, beside the thread that has the rows,
which makes entries, takes digests and writes. No machine with more processors was measured."""

SMALL_FILES_MAX = 16
"""Small sorted files beside each other that are left as they are. Sixteen files, merged at once,
cost a checkpoint 0.3 ms each; a smaller number would rewrite the newest of them more often."""

SMALL_FILE_BYTES = 4 << 20
"""Bytes of a sorted file from which on it is not small. So the newest file of the change index is
rewritten by every sixteenth checkpoint until it has as many: at most 256 KiB a checkpoint."""

SORTED_MERGE_BYTES_MAX = 64 << 20
"""Bytes that one merge of small files reads: 0.3 s, which one call in sixteen may wait."""

NEWEST_MERGE_FACTOR = 32
"""Bytes that GC reads to merge one byte that settled: a store of 64 MB is rewritten once for each
2 MB. A look-up is up to twice as fast behind it."""

SORTED_MERGE_FILE_BYTES = 512 << 10
"""Bytes that a file of a merge counts for besides its own: opening a file takes as long as they
do."""

MANIFEST_BYTES_MAX = 4 << 20
"""Bytes of RocksDB's MANIFEST, from which on it begins a new one. A checkpoint adds 500, copies
the whole file, and so does a reader. A store of 20,000 sorted files fills as much."""

LOG_BYTES_MAX = 8 << 20
"""Bytes of log from which on RocksDB flushes the memtables that need the oldest log. Opening a
store, also beside its writer, reads the whole log: 5 ms a MB. A flush takes a while, in which a
writer of large batches logs up to twice as much. Commits of one row cost as much as without a
bound; batches of 10,000 rows take 5 % more processor time, and 15 % with 4 MiB."""

INFO_LOG_BYTES_MAX = 1 << 20
"""Bytes of each RocksDB `LOG`: a checkpoint adds a line for each file of the store."""

STALL_LOOK_S = 0.002
"""Seconds between two looks of a writer whether RocksDB may stop writes soon. A look takes 3 us,
and `LOG_BYTES_MAX` more than ten times as long to be written."""

STALL_PAUSE_S = 0.0005
"""Seconds for which a writer waits first while RocksDB takes no writes; twice as long each time."""

STALL_PAUSE_S_MAX = 0.01
"""The longest such pause: some flushes take no longer."""

BLOCK_CACHE_BYTES = 512 << 20
"""RocksDB's cache of uncompressed blocks: gets run 1.6 times as fast as with its default, 8 MiB."""


VALUE_CACHE_BYTES = 32 << 20
"""The cache of newest values, unless a store is opened with another size: some 120,000 small
values. Gets of zipfian keys take half their time with it; gets of keys in no order take no longer.
"""

PASSING_CACHE_BYTES = 32 << 20
"""The same cache of a read-only store, which many processes at once read in long passes."""

MOMENT_LOOKS_MAX = 200
"""Times that a reader lists a store's files, beside its writer, to find one consistent moment. A
listing takes 100 us; the writer changes its files a hundred times a second at most."""

MOMENT_COPY_BYTES = 1 << 20
"""Bytes of a log that opening a store read-only copies at once."""

READ_ONLY_OPENINGS_MAX = 50
"""Attempts to open a store read-only beside its writer, which may remove files during each. A
writer must first write as many bytes as it removes, so it cannot defeat many attempts."""

FOLLOW_LOOKS_MAX = 200
"""Catch-ups in a row that a live reader makes, beside its writer, to find one consistent state. A
catch-up takes 1 ms; the writer changes its files a hundred times a second at most."""

FOLLOW_FAILURES_MAX = 10
"""Catch-ups in a row that may fail, because the writer has just removed a file, before the error is
raised."""

FOLLOW_RETRY_S_MAX = 1.0
"""Longest pause, in seconds, between two looks of a live reader after one has failed."""

FOLLOW_WAIT_S = 0.002
"""Seconds between the first two looks of a live reader that is waited for
(`LiveReader.wait_beyond`). A look takes 20 us."""

FOLLOW_INTERVAL_S_MIN = 0.001
"""Shortest pause between two looks of a live reader, whatever its `max_staleness`."""

FOLLOW_REST_S = 1.0
"""The first pause, in seconds, of a guest that nobody has read since its last look; four times as
long after each such look. Its next read looks first, which takes 50 ms at most: behind
`LOG_BYTES_MAX` the log goes into a file."""

FOLLOW_REST_S_MAX = 10.0
"""The longest such pause. The looks in between keep a guest from holding files that the owner has
removed. A look beside an owner that writes without a pause takes 50 ms of a processor: at a look a
second, four guests took a fifth of one of two processors from the owner's puts."""

FOLLOW_TOLD_MAX = 256
"""Changes that a catch-up tells the cache of newest values of a live reader one by one. Behind more
changes the cache is emptied: reading them would take longer than a few hundred look-ups."""

DIRECTORY_TICK_S_MAX = 0.1
"""Seconds during which two changes of a directory may carry one time. File systems take the time of
the kernel's last tick, at most 10 ms old."""

PASSING_READAHEAD_BYTES = 32 << 10
"""Bytes that a pass over a read-only store reads from a file at once, from its first block on. An
entry takes 220 ns; 235 ns where RocksDB has to recognise the pass by itself. A scan of ten rows
takes 1.4 us more than without, and twice as long with 256 KiB."""

IDLE_READERS_MAX = 4
"""Readers kept between look-ups, one a thread. Each pins its files and memtables, until the commits
since its making have `READERS_BEHIND_BYTES_MAX` bytes."""

READERS_BEHIND_BYTES_MAX = 64 << 10
"""Bytes of keys and values that commits may write while the readers of look-ups stay: making a
reader takes some 4 us, so with 500 small commits to each it takes next to nothing."""

SCAN_CHUNK = 4096
"""Entries that a scan passes over at once, and rows of its Arrow batches: few enough to let other
threads run and to fit the cache. A row takes 280 ns; in batches of 1,024 rows 287, of 256 314."""

COLUMNS_ENTRIES_MIN = 8192
"""Entries that a pass takes from RocksDB before it reads the files itself. Opening ten files takes
as long as 3,000 entries."""

STEP_ENTRIES = 1 << 17
"""Entries that a pass over files passes at once, if it finds no rows. That takes some milliseconds,
after which Python delivers signals."""

COLUMNS_FLUSH_BYTES_MIN = 32 << 20
"""Bytes of files for which a pass first has RocksDB write to a file what lies in memory only. A
pass over fewer goes by RocksDB. Each such file is merged with others later, so a pass must be worth
it."""

FLUSH_ROOM_FACTOR = 4
"""How many times the bytes in memory the disk must have free before a pass has RocksDB write them.
RocksDB takes no more writes once a flush has failed, and a read must not bring that about."""

LOOSE_FILES_MAX = 32
"""Staged files that a pass opens ahead: see `kvstore.engine.loose_files`."""

HELD_FILES_MAX = 256
"""Sorted files that a pass holds open. A pass over more goes by RocksDB."""

FEW_ROWS_MAX = 128
"""Rows up to which a scan with a limit reads by a kept reader, within the call. Ten rows take 8 us,
13 by a pass; a hundred take 30 and 33, and where each row has three versions 58 and 89, because the
values of old versions are not read."""

SCAN_CHUNK_BYTES = 4 << 20
"""Bytes of values that a scan takes from the engine at once, roughly."""

BESIDE_OPEN_FILES_MAX = 32
"""Files that a checkpoint holds open while it is read beside its own store. The same process holds
the store's files and must have descriptors left for its log. A pass needs the files of level 0 and
one of each level below."""

FORK_WAIT_S_MAX = 1.0
"""How long a fork waits for RocksDB's threads to end while no store is open. Idle threads end in
0.3 ms. Only a compaction of another user of RocksDB takes longer; the fork does not wait for it."""

SCAN_WORKERS_MAX = 64
"""Threads of one scan. More threads than cores gain nothing."""

SCAN_PIECE_BYTES = 4 << 20
"""Bytes in files of one piece of a scan by threads."""

SCAN_PIECES_MAX = 1 << 16
"""Pieces of one scan by threads, enough for 256 GiB. A larger store has larger pieces."""

SCAN_AHEAD_BYTES_MAX = 16 << 20
"""Bytes of rows that each thread of a scan may have ready before they are taken."""

SORTED_CHANGES_MAX = 100_000
"""Changes of a window that are sorted by key in memory, which takes 20 MB. For more changes a pass
over the span is cheaper than the sort and needs no memory."""

SORTED_CHANGES_BYTES_MAX = 64 << 20
"""Bytes of large values that such a sort holds. Further values are read later, 4 us each."""

SORT_BYTES_MAX = 128 << 20
"""Bytes of keys and values that a task of Spark, or a push, merges at once. At its peak Arrow holds
the rows twice: as they came and sorted."""

LOAD_SORT_BYTES_MAX = 512 << 20
"""The same of an import or a seed from files; a larger one writes sorted runs to disk, and sorts
all rows twice. A million rows of a table with two indexes have 240 MB of keys and values."""

CROSSING_PARTS_MAX = 256
"""Parts of an import whose spans share a key. A pass over them merges all of them, open."""

RUN_BYTES_MAX = 32 << 20
"""Bytes of keys and values in a sorted run that another process merges, such as a Spark task.
Memory that is used again costs no page faults: a million rows take 0.13 s, in runs of 128 MiB
0.18."""

RUN_BLOCK_BYTES = 1 << 20
"""Bytes of a run's block: a reader of one key checks a whole one, each costs an index entry."""

GROUP_COMMIT_WAIT_S_MAX = 60.0
"""How long a commit waits for another thread's fsync before it checks that the thread lives."""

COMMIT_YIELDS_MAX = 16
"""How often a transaction yields before it blocks on the commit lock: longer than a commit."""

MEND_WAIT_S = 10.0
"""How long a call waits for the commit lock to look what an interrupted commit has stored. The
caller may hold a lock that the owner of the commit lock waits for, so it does not wait for ever."""

STREAMS_MAX = 1024
"""Streams of one generation. A reader of all streams holds a chunk of each."""

EPOCHS_PENDING_MAX = 4096
"""Closed epochs in memory until a commit stores them: opening after a crash reads as many."""

EPOCH_EVENTS_PENDING_MAX = 1 << 20
"""Change events of these epochs: bounds the bytes that opening after a crash reads."""

QUIESCENCE_WAIT_S = 600.0
"""How long `force_quiescence` waits for open changesets before it gives up."""

FEED_BATCH_ROWS = 10_000
"""Events of one feed batch: many enough to share the cost of a position, few enough for memory."""

FEED_BATCH_BYTES = 8 << 20
"""Bytes of keys, values and images in one feed batch, which a consumer must be able to hold."""

GC_KEYS_PER_STEP = 4096
"""Keys that GC inspects between two writes, each of which holds the commit lock."""

GC_SORTED_KEYS_MAX = 1 << 16
"""Changed keys that GC sorts before it looks them up. Each sorted set passes over the whole store
where keys are random, so fewer and larger sets read fewer blocks and open fewer files."""

GC_SORTED_KEYS_BYTES_MAX = 8 << 20
"""Bytes of the changed keys that GC sorts. The objects of as many small keys take 6 MB."""

GC_SPANS_PER_STEP = 4096
"""Spans GC merges before it passes over them."""

GC_SHORT_SPAN_ENTRIES = 64
"""Entries up to which GC steps through a span one by one. A pass of its own takes 20 us to make."""

GC_LEAVES_PER_STEP = 32
"""Leaves of the map of range tombstones that GC empties under the commit lock, in 5 ms."""

EXPIRY_STEP_KEYS = 1024
"""Keys that expire in one engine batch, for which the commit lock is held 25 ms."""

EXPIRY_READ_BYTES = 16 << 20
"""Bytes of values that are read at once to find the times of versions that may expire."""

DUE_ROWS_MAX = 1024
"""Changes that are read ahead at once to find when they expire, in 2 ms."""

SETTLE_ROWS_MAX = 4096
"""Rows up to which an import settles. Its keys are read when it is added, in 4 ms at most. A larger
import keeps its record: at most one for each 4096 rows that a store has taken."""

SETTLE_BYTES_MAX = 16 << 20
"""Bytes of the files of such an import: settling writes them once more."""

SETTLE_STEP_ROWS = 1024
"""Rows that settle in one engine batch, for which the commit lock is held 3 ms."""

IMPORT_KEYS_BYTES_MAX = 1 << 20
"""Bytes of the keys that are listed for an import. With longer keys work passes over its spans."""

PAST_IMPORTS_MAX = 65_536
"""Imports without rows that a store remembers, up to twice as many in 25 MB: with one every ten
seconds a week or two. A forgotten import is added anew if it comes again."""

HOLD_TEXT_CHARS_MAX = 500
"""Characters of a hold's address and owner that are stored: enough for a URL."""

GC_DELAY_FACTOR_MAX = 8
"""Intervals that a failing background GC waits at most before it tries again."""

REFUSED_LOADS_MAX = 3
"""Refused loads of a table, or of plain keys, whose files stay in `ingest/`: one to look at, and
two to compare it with. A job that tries again each minute would fill the disk."""

REFUSED_LOAD_S = 7 * 24 * 3600.0
"""Refused loads stay for this long: somebody comes back after a weekend, and decides."""

STALE_IMPORT_S = 24 * 3600.0
"""Age at which GC withdraws an import that was prepared and never added, and removes files left in
`ingest/`. Every import adds its files sooner after preparing them."""

TASK_VALUE_BYTES_MAX = 16 << 20
"""Bytes of a task's value or progress, which is held in memory and written at every claim."""

TASK_NAME_BYTES_MAX = 4096
"""Bytes of a task's id or queue, which are names and not data."""

TASK_MODIFY_MAX = 10_000
"""Tasks in one atomic change: the change is one journal record, and other calls wait for it."""

TASK_PROGRESS_S = 1.0
"""Seconds between two reports of progress that a loop writes: each is a journal record."""

SNAPSHOT_TASKS_MAX = 100
"""Tasks in one record of a snapshot of the task journal."""

TASK_COMPACT_FACTOR = 2
"""A task journal is compacted once it has grown by this many times its snapshot, and by
JOURNAL_COMPACT_BYTES. So a record is rewritten half a time on average."""

COMPACT_PIECES = 16
"""Pieces in which a compaction task rewrites a store. After a crash it repeats one piece."""

TASK_WORKER_DELAY_S = 0.5
TASK_WORKER_DELAY_S_MAX = 60.0
"""First and longest wait of a worker whose queue fails; each wait is twice the one before."""

TASK_WAIT_S_MAX = 3600.0
"""Longest sleep of a claim before it looks again, so that a clock set back cannot strand it."""

TASK_HOLD_S_MAX = 10 * 365 * 86_400.0
"""Longest hold or wait, also of an infinite one: keeps times far inside the range of timestamps."""

RECENT_KEYS_MAX = 1 << 18
"""Keys of recent commits that are remembered while transactions are open: 30 MB. A transaction that
began before them asks the change index."""

TXN_KEYS_MAX = 1 << 16
"""Keys that a transaction remembers as read; more are joined with their neighbours into spans."""

TXN_SPANS_MAX = 1024
"""Spans that a transaction remembers as read; more are joined with their neighbours."""

TRANSACT_ATTEMPTS = 10
"""Attempts of `transact`. With full jitter, ten threads that write one key all succeed."""

TRANSACT_WAIT_S_MIN = 0.001
"""Bound of the first wait after a conflict: about one durable commit."""

TRANSACT_WAIT_S_MAX = 0.5
"""Bound of the longest wait between two attempts."""

REVERT_ROWS_MAX = 1_000_000
"""Keys that one `revert_range` writes, in one atomic batch that is held in memory."""

REVERT_ATTEMPTS = 5
"""Attempts of `revert_range`, which starts over after another write into its span."""

CLEAR_ATTEMPTS = 3
"""Attempts to find what a clear of some rows destroys while others write into the table. The last
one holds the commit lock."""

CLEAR_SPANS_MAX = 4096
"""Spans that one clear of rows destroys: until GC has passed the clear, each historic read looks at
each of them, for 0.3 us."""

VERIFY_PROBLEMS_MAX = 1000
"""Problems that a verification lists: enough to recognise the cause, few enough to read."""

REQUEST_WRITERS_MAX = 4096
"""Writers of other processes of whom a store notes the last request, in some 200 bytes each. As
many may be between a request and its repetition at one time."""

INDEX_CHUNK_ROWS = 4096
"""Rows whose entries a builder of an index makes in one commit, which holds the lock 10 ms."""

FILTER_ENTRIES_MAX = 4096
"""Entries of an index that a filtered scan takes in the place of its rows: look-ups of so many rows
take 10 ms, as long as a scan of 30,000 rows."""

FILTER_SPANS_MAX = 1000
"""Spans of keys, or of entries, that a filter leaves of a table. Each costs a seek."""

FILTER_PARTS_MAX = 1000
"""Parts of a filter that are looked at, and that a server takes: each takes a call of Python inside
the one around it."""

TABLE_ATTEMPTS = 5
"""Times that a client encodes rows whose table is altered meanwhile. Alterations are rare."""

TABLE_NAME_BYTES_MAX = 200
"""Bytes of the name of a table. It is part of a key, and stands in errors."""

TABLE_COLUMNS_MAX = 2000
"""Columns of a table. Each costs 100 bytes of its definition for each layout of its rows."""

NESTED_DEPTH_MAX = 16
"""Types within each other in a column of lists, structs and maps: deep enough for what documents of
JSON hold, and for the stack of every thread."""

NESTED_NODES_MAX = 2000
"""Types in all within a column: as many as a table has columns."""

NESTED_SLOTS_MAX = 1 << 24
"""Values that all lists within one value of a row have, with the room that Arrow keeps for lists of
fixed size that are null. A few forged bytes may stand for as many nulls, which a reader makes."""

TABLE_LAYOUTS_MAX = 1000
"""Layouts that the rows of a table may have over its life: one for each column added, dropped or
widened. A definition with all of them has 400 kB at eight columns. Rows name it in two bytes."""

WARNING_EVERY_S = 10.0
"""Seconds for which a warning that could come with each call is not repeated: a log of a day then
has 8,640 lines of it at most."""

CONFLICTS_WARNED = 100
"""Conflicts within `WARNING_EVERY_S` that are logged as a warning: the writers spend more time on
repetitions than on commits of their own."""

FSYNC_WARNED_S = 1.0
"""A fsync that takes longer is logged as a warning. A disk in good health needs a hundredth."""

LAG_COMMITS_MAX = 1000
"""Commits whose changes a snapshot of the metrics counts, for all feeds together: 0.5 ms."""

APPLY_BYTES_MAX = 16 << 20
"""Bytes of the rows that `kvstore import --sync` and `--op` write as one commit. A commit travels
to the owner of a store as one request, which has at most `SERVER_BODY_BYTES_MAX` bytes."""

CSV_BLOCK_BYTES = 8 << 20
"""Bytes of CSV that Arrow parses at a time: enough for its threads, and few beside those of a
sort."""

TEXT_ROW_BYTES_MAX = 256 << 20
"""Bytes of a row of CSV or TSV, or of a JSON line. A quote that nobody closes, and a line that does
not end, are found there. Larger rows go through Parquet and Arrow files."""


# --------------------------------------------------------------------------------------------------
# The bounds of a server and of its clients.

SERVER_BODY_BYTES_MAX = 64 << 20
"""Bytes of one request: a batch of that size is written in less than a second."""

SERVER_LARGE_BYTES_MAX = 2 << 30
"""Bytes of a larger request, which a batch as an Arrow stream and a value may be: 1 GiB of keys and
values, and what Arrow has beside them. It waits in a temporary file."""

SERVER_SPOOL_BYTES_MAX = 4 << 30
"""Bytes of the temporary files of such requests at one time, all clients together."""

SERVER_LARGE_MEMORY_BYTES_MAX = 4 << 30
"""Bytes of memory that such a batch may take. One of them is done at a time."""

SERVER_ROW_BYTES = 200
"""Bytes of memory that a row of a batch takes beside its key and value: two objects of Python, and
a place among the writes."""

SERVER_SPOOL_PART_BYTES = 1 << 20
"""Bytes that are written to such a file at once: a thread takes 100 us for each part."""

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

CLIENT_LARGE_BYTES_S = 2 << 20
"""Bytes a second that a server does of a request above `SERVER_BODY_BYTES_MAX`, at the least: a
client waits so much longer for the answer."""

CLIENT_TIMEOUT_S_MIN = 0.001
"""The shortest such wait: a socket takes less than a microsecond for no bound at all."""

CLIENT_TIMEOUT_S_MAX = 2_000_000.0
"""The longest such wait, 23 days: a socket counts milliseconds in 31 bits."""

CLIENT_PATIENCE_S = 10.0
"""Seconds for which a client sends a request again that was surely not done, or that the server
does once however often it arrives."""

CLIENT_RETRY_S = 0.05
"""Seconds before the third attempt of a request; twice as long before each later one."""

CLIENT_RETRY_S_MAX = 1.0
"""The longest such wait: a server that was started anew is found within this time."""

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

BROWSE_FILE_ROWS_MAX = 8192
"""Rows of one page that is taken as a file of CSV or JSON."""

BROWSE_ROWS_CHUNK = 512
"""Entries that a look at a table reads, decodes and compares at once."""

BROWSE_COUNT_ENTRIES_MAX = 128 << 10
"""Entries that the counts of one page pass together: some 100 ms. A larger count is estimated."""

BROWSE_FACET_COLUMNS_MAX = 8
"""Columns whose values a page of rows counts."""

BROWSE_FACET_DISTINCT_MAX = 50
"""Distinct values of a column that a page counts. A column with more of them is left out."""

BROWSE_FACET_VALUES = 8
"""Values of a column that a page shows with their counts."""

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

TRENDS_EVERY_S = 10.0
"""Seconds between two samples of the trends of a server."""

TRENDS_SAMPLES = 361
"""Samples of the trends of a server: an hour, and the one before, from which the first rate counts.
They take 60 kB."""

CALLERS_MAX = 256
"""Connections that a server remembers for its page."""

CALLER_CHARS_MAX = 120
"""Characters of the name of a program that calls a server."""

PAGE_FORM_BYTES_MAX = 32 << 10
"""Bytes of a form that the page takes."""

PAGE_DIFFERENCE_LINES_MAX = 200
"""Lines of each of two values that are compared. The time grows with their product."""


# --------------------------------------------------------------------------------------------------
# Bounds of the control socket, and of the scripts that use it.

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

SHARED_TRY_S = 0.002
"""The first pause of a guest that looks for the owner of a shared store. An opening takes 7 ms."""

SHARED_TRY_S_MAX = 0.02
"""The longest pause of such a guest: an owner that closes hands over in some tens of
milliseconds."""

KEEPER_START_S = 10.0
"""How long a keeper waits for its first guest, which has begun it."""

KEEPER_LOOK_S = 0.5
"""How often a keeper counts its guests."""

KEEPER_IDLE_S = 2.0
"""How long a keeper stays behind its last guest: the next process of a script may come."""

CONTROL_LEASE_S = 604_800.0
"""Age of the hold of a first backup, or of a first copy, beside an owner. One that was killed, and
is never repeated, keeps history for a week. A first backup that takes longer has to begin anew."""


# --------------------------------------------------------------------------------------------------
# The bounds of backup collections, of the shards below them, and of replicas.

PART_BYTES_MAX = 64 << 20
"""Uncompressed bytes of one Parquet part: a part is built in memory before it is put."""

ROW_GROUP_ROWS_MAX = 65_536
"""Rows that are encoded, or read, at once: the unit of a merge's memory per source."""

ROW_GROUP_BYTES_MAX = 16 << 20
"""Uncompressed bytes that are encoded, or read, at once, where values are large."""

PART_BLOCK_BYTES = 3 << 19
"""Bytes of a row group as it is stored, about. A reader of one key fetches a row group, and 2 MiB
at most with the part's tail."""

PART_BLOCK_DECODED_BYTES_MAX = 4 << 20
"""Uncompressed bytes of a row group whose rows compress. A reader of one key decodes them all."""

ROW_GROUPS_READ_MAX = 1 << 16
"""Row groups of a part that a reader accepts."""

ROW_GROUPS_MAX = 128
"""Row groups of a part. Each takes at most 16 kB of its footer, most of it for two keys of 4 kB, so
a reader never finds more than `PART_FOOTER_BYTES_MAX`. Parts of usual limits have fifty at most."""

READER_CACHE_BYTES = 256 << 20
"""Bytes of parts that a reader of a collection keeps, unless it is told otherwise."""

READER_PARTS_MAX = 32
"""Parts that a reader of keys keeps open: 2 MB each, at most, with the last row group."""

READER_KEYS_BY_BLOCK_MAX = 1024
"""Keys that are looked up by whole row groups. More keys read the columns that they need."""

PART_TAIL_BYTES = 64 << 10
"""Bytes fetched first from the end of a large part: its footer, and mostly all of its tail."""

PART_WHOLE_BYTES_MAX = 1 << 20
"""Parts up to this size are fetched whole; of a larger part only the wanted row groups are."""

PART_WHOLE_BYTES_BY_BLOCK_MAX = 256 << 10
"""Parts that a reader of one key fetches whole. Of a larger part its filters come first: most parts
do not have the key, and the first get of a reader fetches 2 MiB at most."""

MERGE_ROWS_MAX = 1 << 19
"""Rows that a merge buffers over all its sources together."""

MERGE_BYTES_MAX = 256 << 20
"""Bytes that such a merge buffers: the bound that counts where values are large."""

MERGE_SOURCE_ROWS_MIN = 512
"""Rows that one source of a merge buffers at least, unless their bytes reach a bound first."""

MERGE_SOURCE_BYTES_MIN = 256 << 10
"""Bytes that one source of a merge buffers at least, unless their rows reach a bound first."""

RESTORE_FILE_BYTES = 256 << 20
"""Bytes of one sorted file that a restore builds: a good size for RocksDB's compactions."""

STATE_SCAN_VERSIONS = 1024
"""Versions of a shard's state that are fetched from consensus at once."""

GROUP_ROWS_READ_MAX = 1 << 20
"""Rows of a row group that a reader accepts: more than `ROW_GROUP_ROWS_MAX`, for row groups of
other releases. A decoder allocates memory for all rows before it sees one."""

GROUP_BYTES_READ_MAX = VALUE_BYTES_MAX + (64 << 20)
"""Decoded bytes of a row group that a reader accepts: room for one value of the largest size."""

PART_FOOTER_BYTES_MAX = 2 << 20
"""Bytes of a part's footer: 1.5 kB for each of about ten row groups. A decoded footer takes up to
two hundred times its bytes."""

PART_CONTAINER_MAX = 16_384
"""Entries of a list in a part's footer. Memory for all is allocated before the first is read."""

PART_TEXT_BYTES_MAX = 1 << 20
"""Bytes of a text in a part's footer: a bound of a row group, or the schema."""

PAGE_HEADER_BYTES_MAX = 256 << 10
"""Bytes of a page header. Its statistics hold two keys."""

BOUND_BYTES_MAX = 64
"""Bytes of a part's bound in the state; a longer key is rounded outwards."""

ROLLUP_EVERY = 64
"""Versions between rollups: opening a shard reads about as many beyond the rollup, at most."""

LEASE_NS = 15 * 60 * 1_000_000_000
"""Default lease of a shard reader. Each record batch renews it; it outlasts the work of a slow
restore between two batches."""

WRITER_IDLE_NS = 3 * 24 * 3600 * 1_000_000_000
"""Time after which a nameless writer's last append is forgotten: longer than any repetition."""

RETRY_S = 120.0
"""How long a call on a storage is repeated after transient failures, and after losing races against
other scripts: longer than a provider's short outages, short enough for a script."""

RETRY_TOLD_S = 2.0
"""Seconds from which on a wait is reported: contention among a few scripts ends sooner."""

OBJECT_REQUEST_S = 30.0
"""Seconds for one request to an object store, with the retries inside its client."""

OBJECT_RETRIES_MAX = 2
"""Retries inside the client of an object store: sooner than our own after a lost reply."""

OBJECT_PIECE_BYTES = 8 << 20
"""Bytes of one request that sends or fetches a piece of a large file: latency is 2 % of its time
at 100 MB/s, and a lost piece costs little."""

OBJECT_PIECES_AT_ONCE = 8
"""Pieces of files under way at once. With `OBJECT_PIECE_BYTES` they bound the memory of a transfer,
64 MiB."""

FETCH_SPARE_BYTES = 64 << 20
"""Bytes that stay free on a disk to which an import is fetched: RocksDB needs room for its log."""

ORPHAN_S = 86_400.0
"""Seconds after which a push that was begun and never sealed is given up: its job was killed."""

PULL_EVERY_S = 5.0
"""Seconds between two looks of a store for a new push, one small request each."""

PULL_PAUSE_S_MAX = 60.0
"""The longest pause, in seconds, of a store whose bucket fails."""

PUSHES_TOLD = 100
"""The newest pushes that the place and the status of a store tell, and as many pushes whose states
are the newest: a job waits for one of them."""

PUSH_POLL_S = 0.5
"""Seconds between two looks of a job that waits for stores."""

UPLOADS_AT_ONCE = 2
"""Files of an import that are sent at once, and that wait on the local disk meanwhile."""

STATE_BYTES_MAX = 256 << 20
"""Bytes of JSON of one shard's state: 600,000 parts of 400 bytes."""

LOOKS_MAX = 1_000
"""Times that a reader starts over after other scripts have collected its objects."""

MERGE_FAN_IN = 4
"""Least batches of alike size that compaction merges: each row is rewritten O(log4 n) times."""

SEALED_CHUNK_BYTES = 64 * 1024
"""Plain bytes of one encrypted chunk, the least that a ranged read decrypts. It adds 28 bytes."""

SEALED_HEADS_MAX = 4096
"""Encrypted blobs whose size and nonce a process remembers: two requests less for each range."""

SCRYPT_N = 1 << 15
"""Work factor of scrypt (RFC 7914): some 100 ms and 32 MiB, once per opening of a collection."""

SCRYPT_BYTES_MAX = 256 << 20
"""Memory that the work factors in a key record may ask for: eight times ours. Anybody who can write
to the collection can change the record."""

SCRYPT_COST_MAX = 1 << 22
"""Product of the three work factors in a key record: some two seconds, sixteen times ours."""

KEY_RECORD_BYTES_MAX = 4096
"""Bytes of a key record: ten times ours."""

BACKUP_ATTEMPTS = 4
"""Attempts of a backup, which takes the next window after losing a race against another script."""

REPLICA_WINDOW_ROWS = 1 << 17
"""Rows of a window that a replica applies commit by commit. A larger one is applied by files."""

REPLICA_WINDOW_BYTES = 64 << 20
"""Bytes of such a window."""

REPLICA_BATCH_ROWS = 8192
"""Rows after which a replica writes the gathered commits: an engine batch of a megabyte."""

FEW_CHANGES_BYTES = 256 << 20
"""Bytes of a window of changes that an export sorts in memory; a larger one is a pass."""

JOIN_COLUMNS_ROWS_MAX = 1 << 20
"""Labels that a join looks up in the parts of a collection at once: each time reads all row groups
that the labels touch. A label takes some 150 bytes."""

DRILLS_KEPT = 16
"""Drills of a chain that its collection remembers: a drill takes 300 bytes of the record."""

DRILL_PROBLEM_CHARS_MAX = 300
"""Characters of the problem of a drill in that record."""

FOLLOW_PAUSE_S = 0.5
"""How long a continuous backup pauses after a failure that may pass; twice as long after each."""

FOLLOW_PAUSE_S_MAX = 30.0
"""The longest such pause: how long a bucket may be back before a follower notices."""

FOLLOW_END_S = 2.0
"""How long a stopped follower or puller repeats a failing call. Supervisors of services kill after
ten seconds or more, and the next one makes the window, or takes the push, that was given up."""

SMALL_MERGE_BYTES_MAX = 16 << 20
"""Bytes of parts that a follower merges in the thread for small merges: half a second. A larger
merge runs beside them."""

SMALL_MERGE_ROWS_MAX = 1 << 17
"""Rows of such a merge: the bound that counts where rows are small, or compress well."""

LABEL_CHARS_MAX = 100
"""Characters of the label of an instant, which is a part of the state of a collection."""

KEPT_INSTANTS_MAX = 10_000
"""Instants that a thinning policy may keep: each takes 30 bytes of the state of a collection."""

BACKUP_TOKEN_CHARS_MAX = 1000
"""Characters of the token of a backup: the state of the collection keeps it until a compaction."""

FLEET_CONCURRENCY_MAX = 64
"""Stores of a fleet that are backed up at once: each takes the memory of a backup."""

FLEET_FILE_BYTES_MAX = 4 << 20
"""Bytes of a file of stores: some 40,000 stores. A wrong file is refused before it fills memory."""

HOLD_LOOK_S = 5.0
"""How long `kvstore holds list` waits for a storage that fails, to tell whether backups are
gone."""

WORKERS_MAX = 64
"""Processes of one restore or backup. More processes than cores gain nothing, and each takes
200 MB."""

RESTORE_PIECE_BYTES = 64 << 20
"""Bytes of parts, as they are stored, of one piece of a restore. A kill loses a piece of each
process at most."""

RESTORE_PIECES_MAX = 4096
"""Pieces of one restore: each has a record and at least one file."""

RESTORE_RECORD_BYTES_MAX = 1 << 30
"""Bytes of the record of a piece, which has its range tombstones."""

FETCH_CHUNK_BYTES = 4 << 20
"""Bytes that a restore fetches at once from an object store, to be kept for its next attempt. A
request takes as long as a megabyte or two."""

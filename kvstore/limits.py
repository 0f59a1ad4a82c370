"""Every bound of the store in one place, each with its reason."""

KEY_BYTES_MAX = 64 * 1024
"""A user key. RocksDB copies keys into indexes and blocks; beyond this it is a value."""

VALUE_BYTES_MAX = 1 << 30
"""A value. RocksDB's own limit is 4 GiB, Arrow's binary column 2 GiB: stay below both."""

BATCH_BYTES_MAX = 1 << 30
"""Keys and values of one atomic batch: it is held in memory, and again in the memtable."""

CHANGE_CHUNK_BYTES = 4 << 20
"""Payload of one change entry. Larger commits are cut, so that a reader's memory is bounded."""

INLINE_VALUE_BYTES = 1024
"""Values up to this size travel in the change index; larger ones are read from the versions."""

THIN_FROM_BYTES = 64 << 10
"""Values of a change entry that the log does not take a second time: fewer cost less than the
further write does that puts the full entry in its place (15 us)."""

COMPRESS_FROM_BYTES = 16_384
"""Bodies of change entries below this are stored as they are: a cold call of the codec (20 us)
costs more than the bytes of log that it saves, and RocksDB compresses what it flushes."""

INDEX_ENTRIES_PER_TAKE = 64
"""Change entries that a reader of the index takes at once, where they are small. Large entries are
taken one by one: a chunk is what a reader holds."""

WHOLE_ROWS_MIN = 512
"""Rows from which on a change entry is a record batch of its own. Smaller entries are gathered: a
batch has a price (40 us) that its rows must earn."""

REBUILD_FRAGMENTS_FROM = 65
"""Range tombstones of one commit from which on building a small map anew beats adding each."""

STRETCHES_MAX = 64
"""Boundaries in a leaf of the map of range tombstones, and nodes in a branch of it: a write copies
one node of each depth. Two at least."""

ARROW_ROWS_MAX = 16_384
"""Rows of one record batch: large enough to amortise Arrow, small enough to stay in cache."""

ARROW_BYTES_MAX = 32 << 20
"""Bytes of one record batch, far below the 2 GiB of an Arrow binary column."""

JSON_BYTES_MAX = 64 << 20
"""One JSON record or manifest. Its largest kind, the manifest of an import, takes some 300 bytes a
part and its two bounds; parsed, hostile JSON takes some twenty times its size of memory."""

JSON_DEPTH_MAX = 64
"""Brackets of JSON nested in each other: records nest five deep, and the parser's recursion of
this depth fits any stack."""

JOURNAL_RECORD_BYTES_MAX = 2 << 30
"""Payload of one journal record: an atomic batch with room for its framing."""

JOURNAL_FILE_BYTES = 64 << 20
"""A journal file is closed at this size, rarely enough for the four fsyncs that this costs."""

JOURNAL_FILE_RECORDS = 1 << 20
"""A journal file is closed at this many records: bounds the search for an ordinal in it."""

JOURNAL_SECTOR_BYTES = 512
"""A sector: a disk writes it whole or not at all, and no disk has smaller ones. A power cut leaves
an older state or the newest state of each sector that was not synced, each for itself."""

JOURNAL_READ_BYTES = 256 << 10
"""Bytes a journal reader takes at once: records of one such piece stay in cache together."""

JOURNAL_COMPACT_BYTES = 16 << 20
"""Journal bytes behind the newest snapshot from which on opening writes a new one by default."""

CHUNK_ENTRIES_MAX = 1024
"""Entries of one chunk of the memory engine: the root of a million entries is then about as long as
a chunk, so that what a write copies beside an open cursor is least."""

MEMORY_BATCH_IN_PLACE_MAX = 1024
"""Operations up to which the memory engine writes a batch in place, with readers waiting (a
millisecond); a larger one is prepared beside them."""

MEMORY_RECORD_BYTES = 1 << 20
"""Payload of one journal record of an ingest or a snapshot of the memory engine."""

BLOCK_BYTES = 8 << 10
"""A block of RocksDB, the unit of reading, caching and checking. Beside its default of 4 KiB,
sorted look-ups in 300,000 rows take 0.74 of the time and scans 0.92; single ones are no slower."""

BLOCK_CACHE_BYTES = 512 << 20
"""RocksDB's cache of uncompressed blocks, filled as blocks are read: 1 M rows of 116 bytes fit
several times over, and gets run 1.6x as fast as with the 8 MiB it has by default."""

PASSING_CACHE_BYTES = 32 << 20
"""The same of a store opened read-only: such are read in passes, by many processes at once."""

MOMENT_LOOKS_MAX = 200
"""Looks at a store's files to find them at one moment, beside its writer: a look takes 100 us, and
the writer's list of files changes some hundred times a second at most."""

MOMENT_COPY_BYTES = 1 << 20
"""Bytes of a log that are copied at once where a store is opened to be read."""

READ_ONLY_OPENINGS_MAX = 50
"""Openings to read that are tried beside a writer: it may remove files during each, but removes
some only after it has written as many."""

PASSING_READAHEAD_BYTES = 32 << 10
"""What such a pass reads from a file at once, from its first block on: 220 ns an entry, and 235
where RocksDB is left to find out by itself that it is a pass. Scans of ten rows take 1.4 us more,
and twice as long with 256 KiB."""

IDLE_READERS_MAX = 4
"""Readers kept between look-ups: one per thread that is likely to run at once. Each pins the
files it was made over until the next write."""

SCAN_CHUNK = 4096
"""Entries passed over at once, and rows of the batches of an Arrow scan: small enough to let others
run and to lie in the cache (a row of batches of 4,096 takes 280 ns, of 1,024 287, of 256 314)."""

SCAN_CHUNK_BYTES = 16 << 20
"""Bytes of values taken from the engine at once, about: large values come in chunks of fewer."""

BESIDE_OPEN_FILES_MAX = 32
"""Files that a checkpoint holds open which is read beside its own store: the process has those of
the store, whose log must find a descriptor left. A pass needs those of level 0, and one of each
level below."""

FORK_WAIT_S_MAX = 1.0
"""How long a fork waits for RocksDB's idle threads to end while no store is open: they take 0.3 ms,
and a compaction under way, which only another user of RocksDB can have, is not waited for."""

TOLD_FILES_MAX = 32
"""Files of imports that were looked at and stay open in a throw-away database: their bytes stay on
disk until it is made anew, and a process has 256 descriptors or more."""

SCAN_WORKERS_MAX = 64
"""Processes of one scan: more than a machine has cores gain nothing, and each is 100 MB."""

SCAN_WORKERS_BYTES_MIN = 24 << 20
"""Bytes of a span, on file and in memtables, from which on processes are asked: of 5 MB two take
1.1 times as long as one, of 10 MB as long, of 16 MB 0.85, of 24 MB and more 0.7 to 0.85."""

SCAN_PIECE_BYTES = 4 << 20
"""Bytes on file of the pieces that a parallel scan is cut into: what a worker may be ahead, so that
nobody waits long."""

SCAN_PIECES_MAX = 1 << 16
"""Pieces of one parallel scan: 256 GiB on file; pieces of larger stores are larger."""

SCAN_PART_BYTES = 4 << 20
"""Rows that a worker of a parallel scan hands over at once."""

SCAN_PARTS_AHEAD_MAX = 4
"""Parts written and not yet taken, of each worker: what a parallel scan holds on disk."""

SORTED_CHANGES_MAX = 100_000
"""Changes of a window that are sorted by key in memory (some 20 MB); beyond, a pass over the
span is cheaper than the sort and needs no memory."""

SORTED_CHANGES_BYTES_MAX = 64 << 20
"""Large values of such a window that are held meanwhile; those beyond are read when it is their
turn (4 us each)."""

SORT_BYTES_MAX = 128 << 20
"""Keys and values that an import from files sorts at once; beyond, sorted runs go to disk. Arrow
holds the rows as they came and in one piece: twice as much at the peak."""

CROSSING_PARTS_MAX = 256
"""Parts of an import whose spans have a key in common: a pass over them has all of them open, and
the store merges them."""

RUN_BYTES_MAX = 32 << 20
"""Keys and values of a sorted run that others merge, as tasks of Spark do. Memory that is used
again costs no page faults: a million rows take 0.13 s in such runs, 0.18 in runs of 128 MiB."""

RUN_BLOCK_BYTES = 1 << 20
"""Bytes of a run's block: a reader of one key must check as many, and each block costs an entry
of a key and three numbers."""

GROUP_COMMIT_WAIT_S_MAX = 60.0
"""How long a commit waits for another thread's fsync before it looks again whether that died."""

COMMIT_YIELDS_MAX = 16
"""How often a transaction lets others run before it waits for the commit lock. What holds that for
longer than a commit in memory takes is waited for."""

STREAMS_MAX = 1024
"""Streams of one generation. A commit writes an entry to each stream it touches, and a reader of
all of them holds a chunk of each."""

EPOCHS_PENDING_MAX = 4096
"""Closed epochs kept in memory until a commit takes them along: 128 KiB, and the number of commits
whose headers an open after a crash has to read."""

EPOCH_EVENTS_PENDING_MAX = 1 << 20
"""Change events of the epochs kept in memory: bounds the bytes that the same open reads."""

QUIESCENCE_WAIT_S = 600.0
"""How long `force_quiescence` waits for open changesets before it gives up."""

FEED_BATCH_ROWS = 10_000
"""Events of one feed batch: large enough to share the price of a position, small in memory."""

FEED_BATCH_BYTES = 8 << 20
"""Keys, values and images of one feed batch: what a consumer must be able to hold."""

GC_KEYS_PER_STEP = 4096
"""Keys GC looks at between two writes: the commit lock is held for one batch of removals, and a
stop is heard, every few milliseconds."""

GC_SPANS_PER_STEP = 4096
"""Spans GC merges before it passes over them."""

HOLD_TEXT_CHARS_MAX = 500
"""Characters of a hold's address and owner that are kept: enough for a URL, and a line to read."""

GC_DELAY_FACTOR_MAX = 8
"""How many intervals a background GC that keeps failing waits at most before it tries again: it
need not fill the log, and goes on soon after what was wrong has passed."""

STALE_IMPORT_S = 24 * 3600.0
"""Age at which GC takes back an import that was prepared and never added, and files left in
`ingest/`: longer than any import takes between the two."""

TASK_VALUE_BYTES_MAX = 16 << 20
"""A task's value or progress: it is held in memory, and written again at every claim."""

TASK_NAME_BYTES_MAX = 4096
"""A task's id or queue: a name, not data."""

TASK_MODIFY_MAX = 10_000
"""Tasks in one atomic change: it is one journal record, and others wait while it is applied."""

TASK_PROGRESS_S = 1.0
"""Progress of a task is written down at most this often by loops: each is a journal record."""

SNAPSHOT_TASKS_MAX = 100
"""Tasks in one record of a snapshot of the task journal."""

TASK_COMPACT_FACTOR = 2
"""A task journal is compacted once it has grown by this many times its snapshot (and by
JOURNAL_COMPACT_BYTES): so a record is rewritten half a time on average."""

COMPACT_PIECES = 16
"""Pieces in which a compaction task rewrites a store: what a crash makes it do again."""

TASK_WORKER_DELAY_S = 0.5
TASK_WORKER_DELAY_S_MAX = 60.0
"""How long a worker whose queue fails waits before it claims again: twice as long each time."""

TASK_WAIT_S_MAX = 3600.0
"""How long a claim sleeps before it looks again, so that a clock set back cannot strand it."""

TASK_HOLD_S_MAX = 10 * 365 * 86_400.0
"""A hold or a wait; an infinite one is this long. Keeps times far inside a timestamp."""

RECENT_KEYS_MAX = 1 << 18
"""Keys remembered of recent commits while transactions are open (some 30 MB); those whose time is
older ask the change index."""

TXN_KEYS_MAX = 1 << 16
"""Keys a transaction remembers to have read; beyond, neighbours are joined into spans."""

TXN_SPANS_MAX = 1024
"""Spans a transaction remembers to have read; beyond, neighbours are joined."""

TRANSACT_ATTEMPTS = 10
"""Times `transact` runs a transaction. With full jitter, ten threads on one key get through."""

TRANSACT_WAIT_S_MIN = 0.001
"""Bound of the first wait after a conflict: about one durable commit."""

TRANSACT_WAIT_S_MAX = 0.5
"""Bound of the longest wait between two attempts."""

REVERT_ROWS_MAX = 1_000_000
"""Keys one `revert_range` writes: it is one atomic batch, held in memory."""

REVERT_ATTEMPTS = 5
"""Times `revert_range` starts over because others wrote into its span."""

VERIFY_PROBLEMS_MAX = 1000
"""Problems a verification lists: enough to see what happened, little enough to read."""

# -- shards (backup/shard) -------------------------------------------------------------------

PART_BYTES_MAX = 64 << 20
"""Uncompressed bytes of one Parquet part: a part is built in memory before it is put."""

ROW_GROUP_ROWS_MAX = 65_536
"""Rows of a part's row group: the unit of skipping, and of a merge's memory per source."""

ROW_GROUP_BYTES_MAX = 16 << 20
"""Uncompressed bytes of a row group, where values are large: bounds a merge's memory too."""

ROW_GROUPS_MAX = 128
"""Row groups of a part. Each takes at most 16 kB of its footer, most of it for two keys of 4 kB, so
a reader never finds more than `PART_FOOTER_BYTES_MAX`. Parts of usual limits have fifty at most."""

PART_WHOLE_BYTES_MAX = 1 << 20
"""Parts up to this size are fetched in one piece; of larger ones only the row groups asked for."""

MERGE_ROWS_MAX = 1 << 19
"""Rows that a merge buffers over all its sources together."""

MERGE_BYTES_MAX = 256 << 20
"""Bytes that such a merge buffers: they count where values are large."""

MERGE_SOURCE_ROWS_MIN = 512
"""Rows that one source of a merge buffers, unless its bytes reach their own bound: fewer cost
more in batches than they spare in memory."""

MERGE_SOURCE_BYTES_MIN = 256 << 10
"""Bytes that one source of a merge buffers, unless its rows reach their own bound."""

RESTORE_FILE_BYTES = 256 << 20
"""Bytes of one sorted file that a restore builds: what RocksDB likes to open and compact."""

STATE_SCAN_VERSIONS = 1024
"""Versions of a shard's state that are fetched from consensus at once."""

GROUP_ROWS_READ_MAX = 1 << 20
"""Rows of a row group that is read: room for larger ones than `ROW_GROUP_ROWS_MAX`, from releases
that wrote others. A decoder allocates for them before it sees them."""

GROUP_BYTES_READ_MAX = VALUE_BYTES_MAX + (64 << 20)
"""Decoded bytes of a row group that is read: it may hold one value of the largest size."""

PART_FOOTER_BYTES_MAX = 2 << 20
"""A part's footer: some 1.5 kB a row group, of which there are about ten. Decoded it takes up to
two hundred times its bytes."""

PART_CONTAINER_MAX = 16_384
"""Entries of a list in a part's footer: memory for all is taken before the first is read."""

PART_TEXT_BYTES_MAX = 1 << 20
"""A text in a part's footer: a bound of a row group, or the schema."""

PAGE_HEADER_BYTES_MAX = 256 << 10
"""Header of a page: a page's statistics hold two keys, in older releases twice."""

INLINE_BYTES_MAX = 256 << 10
"""Bytes of parts kept inside a shard's state; beyond it they must be blobs (rollups stay small)."""

BOUND_BYTES_MAX = 64
"""Bytes of a key kept as a part's bound in the state; longer keys are rounded outwards."""

ROLLUP_EVERY = 64
"""Versions between rollups: what opening a shard reads beyond the rollup is at most about this."""

LEASE_NS = 15 * 60 * 1_000_000_000
"""Default lease of a shard reader: long enough for what a slow restore does between two record
batches, which renew it."""

WRITER_IDLE_NS = 3 * 24 * 3600 * 1_000_000_000
"""After which a nameless writer's last append is forgotten: longer than anybody's patience with one
append."""

RETRY_S = 120.0
"""How long a call on a storage is made again after failures that may pass, and against other
scripts that were faster: longer than a provider's short outages, short enough for a script."""

RETRY_TOLD_S = 2.0
"""A wait above this is told: contention among a few scripts ends sooner."""

OBJECT_REQUEST_S = 30.0
"""One request to an object store, and the retries that its client makes unseen."""

OBJECT_RETRIES_MAX = 2
"""Retries that the client of an object store makes unseen: it has a reply lost or a 503 behind it
sooner than we do."""

STATE_BYTES_MAX = 256 << 20
"""JSON of one shard's state: some 400 bytes a part, so six hundred thousand of them."""

LOOKS_MAX = 1_000
"""Times a reader looks again for what others keep collecting before it gives up."""

MERGE_FAN_IN = 4
"""Least batches of alike size that compaction merges: each row is rewritten O(log4 n) times."""

SEALED_CHUNK_BYTES = 64 * 1024
"""Plain bytes of one encrypted chunk: what a ranged read decrypts at least, at 28 bytes' cost."""

SCRYPT_N = 1 << 15
"""Work factor of scrypt (RFC 7914): some 100 ms and 32 MiB, once per opening of a collection."""

SCRYPT_BYTES_MAX = 256 << 20
"""Memory that the work factors in a key record may ask for: eight times ours. The record comes with
the collection, from whoever could write there."""

SCRYPT_COST_MAX = 1 << 22
"""Product of the three work factors in a key record: some two seconds, sixteen times ours."""

KEY_RECORD_BYTES_MAX = 4096
"""A key record: ten times ours."""

BACKUP_ATTEMPTS = 4
"""How often a backup takes the next window after losing a race against another script."""

REPLICA_WINDOW_ROWS = 1 << 17
"""Rows of a window that a replica takes commit by commit, sorted in memory; larger: by files."""

REPLICA_WINDOW_BYTES = 64 << 20
"""Bytes of such a window."""

REPLICA_BATCH_ROWS = 8192
"""Rows after which a replica writes the commits it has gathered: an engine batch of a megabyte."""

FEW_CHANGES_BYTES = 256 << 20
"""Bytes of a window of changes that an export sorts in memory; larger ones are a pass."""

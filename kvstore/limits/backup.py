"""The bounds of backup collections, of the shards below them, and of replicas."""

from kvstore.limits.store import VALUE_BYTES_MAX

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
"""Bytes of a page header. Its statistics hold two keys; pages of older releases hold four."""

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

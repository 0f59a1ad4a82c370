"""Storage by URL: blobs and consensus, as a contract and on memory, files and object stores.

Floors, from the top:

    address                           the storage that a URL names
    file_blob file_consensus memory object_store
    fetched_blob limited_blob         parts that are fetched once; bytes at a bounded rate
    below cached_blob                 a part of a blob; a blob whose ranges are kept on this machine
    hurried                           a blob for a worker that may be stopped
    contract                          blobs and consensus
    kept_bytes                        bytes in memory or in a directory, up to a bound
    object_errors
    os_errors patience
"""

"""Storage of shards: blobs and consensus, as a contract and on memory, files and object stores.

Floors, from the top:

    address                           the storage that a URL names
    file_blob file_consensus memory object_store
    contract                          blobs and consensus
    os_errors patience
"""

"""Storage by URL: blobs and consensus, as a contract and on memory, files and object stores."""

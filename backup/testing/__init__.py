"""Tools that prove a storage of backups: contracts to inherit, and storage that fails at random.

`blobs` and `consensus` need pytest, which the extra `testing` of kvstore installs. Production code
never imports this package.

Floors, from the top:

    blobs                             the contract of blobs, as a suite that a blob's tests inherit
    consensus                         the contract of consensus, likewise for a consensus
    faults                            a blob and a consensus that refuse, delay and lose calls
    proxy                             a server in front of an object store that does the same
"""

"""The contracts of a storage of backups, as suites that other implementations inherit.

They need pytest, which the extra `testing` of kvstore installs. Production code never imports this
package.

Floors, from the top:

    blobs                             the contract of blobs, as a suite that a blob's tests inherit
    consensus                         the contract of consensus, likewise for a consensus
"""

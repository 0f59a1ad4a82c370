"""The contracts of a storage of backups, as suites that other implementations inherit.

They need pytest, which the extra `testing` of kvstore installs. Production code never imports this
package.
"""

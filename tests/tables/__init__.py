"""Tables: typed rows over bytes."""

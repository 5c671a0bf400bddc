"""Teacher weights in memory: flat layouts, loading from files, shared copies."""

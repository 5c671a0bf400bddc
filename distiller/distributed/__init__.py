"""The processes of a run: ranks, their rendezvous, failures of ranks, signals, devices."""

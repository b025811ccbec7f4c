"""What runs, events, decisions and errors are: pure values, no I/O and no clock."""

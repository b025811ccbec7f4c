"""Pages and schemas of the public contract, made from the code that keeps it."""

"""Public test support: contracts, fakes and scripted doubles."""

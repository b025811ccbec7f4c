"""The guided tour that perdure demo runs."""

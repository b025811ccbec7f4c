"""Files, skills and memory that agents work with."""

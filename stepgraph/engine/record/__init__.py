"""Recordings: a chain of segments for a whole step (`chain`), a forward with its backward for a part (`pair`)."""

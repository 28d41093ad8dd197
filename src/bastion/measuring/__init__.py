"""The one measuring loop and its store. Kept empty of imports: reading facts needs no torch."""

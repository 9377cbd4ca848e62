"""Forms of operators that the importer does not take, by ones that it does."""

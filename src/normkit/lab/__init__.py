"""The lab: statements about normalization, each with its measurement, its criterion and a computed verdict."""

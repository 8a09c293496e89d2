"""The rendering of reports: documents, tables, drawings."""

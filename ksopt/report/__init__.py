"""How a report looks: documents, tables, drawings."""

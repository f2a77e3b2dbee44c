"""Which earlier text drafts the next tokens: index, store, persistence and exchange. No I/O on the decode path."""

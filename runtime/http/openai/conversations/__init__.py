"""/v1/conversations: conversations that the server keeps, and that responses continue."""

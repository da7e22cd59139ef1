"""HTTP: parse, check, answer. The only room that knows fastapi, starlette, sse_starlette and pydantic."""

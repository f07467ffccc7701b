"""One module a patch, each with a `PATCH` that declares it. The registry names them in order."""

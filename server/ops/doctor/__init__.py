"""`python -m server doctor`: is this machine fit to serve, and if not, what is to be done. Each check looks at one
thing and makes findings; nothing is changed."""

"""The judge: decides in its own process what a candidate in a child process is worth. It never imports an agent."""

"""Launch lines for the boxes people have, with the reason of every word in them: data, rendering and rehearsal."""

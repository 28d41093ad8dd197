"""From run directories to one HTML page. Reads facts; never imports torch."""

"""HTML reports and leaderboards from run directories. Reads facts; never imports torch."""

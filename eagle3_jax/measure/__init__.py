"""What every measurement needs: clocks, the machine, tables and records."""

"""Programs that take a device for themselves: stages run them in processes of their own, and they load torch."""

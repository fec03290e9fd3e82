//! Trace-driven simulation of the stack: policies, engines, flash device.

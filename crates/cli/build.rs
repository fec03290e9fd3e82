//! What the tests of this crate need beside cargo.

#[path = "../../tests/lib/foreign.rs"]
mod foreign;

fn main() {
    foreign::declare(&[
        "chromium",
        "nbdinfo",
        "nbdcopy",
        "qemu-img",
        "qemu-io",
        "nbdkit",
        "nbdfuse",
        "fusermount3",
        "fuse",
        "mount",
        "mount-namespace",
        "loop",
        "root",
        "mkfs.ext4",
        "debugfs",
        "shared",
    ]);
}

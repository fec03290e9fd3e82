//! What the tests of this crate need beside cargo.

#[path = "../../tests/lib/foreign.rs"]
mod foreign;

fn main() {
    foreign::declare(&[
        "nbdinfo",
        "nbdcopy",
        "qemu-img",
        "qemu-io",
        "qemu-nbd",
        "python3-libnbd",
        "fio-nbd",
        "nbdkit",
        "mkfs.ext4",
        "debugfs",
    ]);
    let has_ublk = std::path::Path::new("/dev/ublk-control").exists();
    foreign::declare_able(&[("no-ublk", !has_ublk)]);
}

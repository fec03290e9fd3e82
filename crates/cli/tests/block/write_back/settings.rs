//! What `--write`, `--dirty-max`, `--marker` and `--no-marker` may say. Nothing here is touched: what cannot be meant is refused before.

use std::process::Command;

use super::has;
use crate::daemon::larder;

/// `serve` with two volumes, none of which is there.
fn serve(more: &[&str]) -> (Option<i32>, String) {
    // The directory for notes is made before the cache is looked for.
    let state = tempfile::tempdir().unwrap();
    let all = [
        &["serve", "--cache", "/nowhere/cache", "--listen", "unix:/nowhere/socket"][..],
        &["--volume", "db=file:/nowhere/db", "--volume", "www=file:/nowhere/www"],
        &["--state-dir", state.path().to_str().unwrap()],
        more,
    ];
    larder(&all.concat())
}

#[test]
fn what_cannot_be_meant_is_refused_in_one_line_with_its_remedy() {
    for (more, words) in [
        // Modes.
        (&["--write", "fast"][..], &["--write 'fast'", "hdd-ssd", "back:ordered"][..]),
        (&["--write", "back:journaled,grain=flush"], &["grain=", "leave it out"]),
        (&["--write", "back:best"], &["'best' is no order", "choose any, ordered or journaled"]),
        (&["--write", "back:any,grain=flush"], &["grain=", "leave it out"]),
        (&["--write", "back:ordered,grain=line"], &["grain='line'", "flush or completion"]),
        (&["--write", "back:any,destage=soon"], &["destage='soon'", "periodic:SECONDS"]),
        (&["--write", "back:any,destage=periodic:0"], &["periodic:0", "between 1 and"]),
        (&["--write", "db=back:any,cut=marks"], &["cut=", "'journaled' alone"]),
        (&["--write", "db=back:any,destage=none,destage=none"], &["destage= is said twice"]),
        (&["--write", "db=hdd-inv"], &["hdd-inv is of all volumes", "without 'db='"]),
        (&["--write", "hdd-inv", "--write", "hdd-upd"], &["hdd-upd", "hdd-inv", "choose one"]),
        (&["--write", "back:any", "--write", "back:ordered"], &["back:any says already"]),
        // Shares.
        (
            &["--share", "db=10%..", "--share", "db=20%.."],
            &["--share db=20%..", "'db' has the share 10%.. already", "say one of the two"],
        ),
        // Volumes.
        (
            &["--write", "dd=back:any"],
            &["--write dd=back:any", "no --volume has the name 'dd': there are db, www"],
        ),
        (
            &["--write", "db=back:any", "--write", "db=back:ordered"],
            &["--write db=back:ordered", "twice of volume 'db'"],
        ),
        (&["--write", "db=back:any", "--read-only"], &["'db' is only read"]),
        (
            &["--write", "db=back:any", "--read-only-volume", "db"],
            &["'db' is only read", "leave one of them out"],
        ),
        // Journals.
        (
            &["--write", "db=back:ordered", "--journal", "db=/j"],
            &["--journal db=/j", "'db' is not journaled", "--write db=back:journaled"],
        ),
        (&["--write", "back:journaled", "--journal", "/j"], &["--journal /j", "NAME=/j"]),
        (&["--write", "back:journaled", "--journal", "db="], &["'db='", "NAME=PLACE"]),
        (
            &["--write", "back:journaled", "--journal", "db=/j", "--journal", "www=/j"],
            &["--journal www=/j", "'db' has its journal there"],
        ),
        (
            &["--write", "back:journaled", "--marker", "db=/m", "--journal", "www=/m"],
            &["--journal www=/m", "'db' has its marker there"],
        ),
        (&["--write", "back:journaled", "--journal", "dd=/j"], &["no --volume has the name 'dd'"]),
        (
            &["--write", "back:any", "--journal-local"],
            &["--journal-local", "no volume is journaled"],
        ),
        // Bounds.
        (&["--write", "back:any", "--dirty-max", "lots"], &["--dirty-max 'lots'", "is not a size"]),
        (&["--write", "back:any", "--dirty-max", "4k"], &["'4k'", "at least 1 MiB"]),
        (&["--dirty-max", "1g"], &["--dirty-max 1 GiB", "no volume writes back"]),
        (
            &["--write", "db=back:any", "--dirty-max", "www=1g"],
            &["www=1 GiB", "'www' does not write back", "--write www=back:ordered"],
        ),
        (&["--write", "back:any", "--dirty-max", "dd=1g"], &["no --volume has the name 'dd'"]),
        (
            &["--write", "back:any", "--dirty-max", "db=1g", "--dirty-max", "db=2g"],
            &["--dirty-max db=2 GiB", "twice"],
        ),
        (
            &["--write", "back:any", "--dirty-max", "1g", "--dirty-max", "2g"],
            &["--dirty-max 2 GiB", "already of all volumes"],
        ),
        (
            &["--write", "back:any", "--dirty-age-max", "soon"],
            &["'soon' is no age", "SECONDS,hard"],
        ),
        (&["--dirty-age-max", "5"], &["--dirty-age-max 5", "no volume writes back"]),
        (
            &["--write", "db=back:any", "--dirty-age-max", "www=5,hard"],
            &["--dirty-age-max www=5,hard", "'www' does not write back"],
        ),
        (
            &["--write", "back:any,destage=none", "--dirty-age-max", "5"],
            &["--dirty-age-max 5: volume 'db': with destage=none", "leave one of the two out"],
        ),
        (
            &["--write", "back:any", "--dirty-age-max", "5", "--dirty-age-max", "6,hard"],
            &["--dirty-age-max 6,hard", "already of all volumes"],
        ),
        // Marks.
        (&["--write", "back:ordered,cut=marks"], &["cut=", "'journaled' alone"]),
        (&["--write", "back:journaled,on-full=cut"], &["on-full=", "cut=marks"]),
        // Markers.
        (&["--marker", "/m"], &["--marker '/m'", "write NAME=PLACE"]),
        (&["--marker", "db="], &["--marker 'db='", "write NAME=PLACE"]),
        (&["--marker", "dd=/m"], &["--marker dd=/m", "no --volume has the name 'dd'"]),
        (&["--no-marker", "dd"], &["--no-marker dd", "no --volume has the name 'dd'"]),
        (&["--marker", "db=/a", "--marker", "db=/b"], &["--marker db=/b", "twice of volume 'db'"]),
        (&["--no-marker", "db", "--no-marker", "db"], &["--no-marker db", "twice"]),
        (
            &["--marker", "db=/m", "--no-marker", "db"],
            &["--no-marker db", "--marker db=/m", "choose one"],
        ),
        (
            &["--marker", "db=/m", "--marker", "www=/m"],
            &["--marker www=/m", "volume 'db' has its marker there"],
        ),
        // Stores that are vouched for.
        (&["--store-durable", "dd"], &["--store-durable dd", "no --volume has the name 'dd'"]),
        (&["--store-durable", "db"], &["--store-durable db", "is flushed: leave it out"]),
        // What excludes it.
        (
            &["--write", "db=back:any", "--record", "/nowhere/record"],
            &["--record '/nowhere/record'", "a run that writes back cannot be recorded"],
        ),
        (
            &["--write", "back:any", "--record", "/nowhere/record"],
            &["a run that writes back cannot be recorded"],
        ),
    ] {
        let (code, message) = serve(more);
        assert_eq!(code, Some(2), "{more:?}: {message}");
        assert_eq!(message.trim().lines().count(), 1, "{more:?}: {message}");
        has(&message, words);
    }
}

#[test]
fn what_can_be_meant_comes_as_far_as_the_cache() {
    for more in [
        &["--write", "back:ordered"][..],
        &["--write", "hdd-upd", "--write", "db=back:any", "--dirty-max", "db=1g"],
        &["--write", "db=back:any", "--write", "back:ordered,grain=completion"],
        &["--write", "db=back:any,destage=periodic:30", "--dirty-max", "1g"],
        &["--write", "back:any,destage=none", "--read-only-volume", "www"],
        &["--write", "db=back:journaled,cut=marks,on-full=cut", "--dirty-age-max", "db=5,hard"],
        &["--write", "back:any", "--write", "db=back:ordered", "--dirty-age-max", "db=5"],
        &["--marker", "db=nbd://filer/marker", "--no-marker", "www"],
    ] {
        let (code, message) = serve(more);
        assert_eq!(code, Some(1), "{more:?}: {message}");
        has(&message, &["cache '/nowhere/cache': there is no such file"]);
    }
}

fn printed(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "serve", "--print-config"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_file_says_the_same_as_the_flags_and_is_printed_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("larder.toml");
    let path = config.to_str().unwrap();
    let volumes = "[volume]\ndb = \"file:/nowhere/db\"\nwww = \"file:/nowhere/www\"\n";
    let served = |text: &str| {
        let text = format!("cache = \"/nowhere/cache\"\nlisten = \"unix:/nowhere/s\"\n{text}");
        std::fs::write(&config, text).unwrap();
        let state = dir.path().join("state");
        larder(&["serve", "--config", path, "--state-dir", state.to_str().unwrap()])
    };
    // As a list, and as tables.
    for text in [
        "write = [\"hdd-upd\", \"db=back:any\"]\ndirty-max = \"1g\"\nno-marker = [\"db\"]\n",
        "[write]\ndb = \"back:ordered,grain=completion\"\n[dirty-max]\ndb = \"1g\"\n[marker]\ndb = \"/m\"\n",
        "write = \"back:ordered\"\n",
        "write = \"back:journaled,cut=marks\"\ndirty-age-max = \"5,hard\"\n",
        "write = \"back:any\"\n[dirty-age-max]\ndb = \"5\"\n",
    ] {
        let (code, message) = served(&format!("{text}{volumes}"));
        assert_eq!(code, Some(1), "{text}: {message}");
        has(&message, &["there is no such file"]);
        let text = printed(&["--config", path]);
        let again = dir.path().join("again.toml");
        std::fs::write(&again, &text).unwrap();
        assert_eq!(printed(&["--config", again.to_str().unwrap()]), text);
    }
    let text = printed(&["--write", "hdd-upd", "--write", "db=back:any"]);
    has(&text, &["\nwrite = [\"hdd-upd\", \"db=back:any\"]\n", "\n# marker =\n"]);
    // Mistakes are named with their line.
    for (text, words) in [
        ("write = \"back:best\"\n", &["line 3", "'write'", "'best'"][..]),
        ("[write]\ndb = \"back:any,grain=flush\"\n", &["line 4", "'write'", "grain="]),
        ("dirty-max = \"0\"\n", &["line 3", "'dirty-max'", "at least 1 MiB"]),
        ("write = \"dd=back:any\"\n", &["no --volume has the name 'dd'"]),
    ] {
        let (code, message) = served(&format!("{text}{volumes}"));
        assert_eq!(code, Some(2), "{text}: {message}");
        has(&message, words);
    }
}

#[test]
fn a_write_log_has_a_size_that_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let format = |size: &str| {
        larder(&["format", cache.to_str().unwrap(), "--size", "128m", "--write-log", size])
    };
    for (size, words) in [
        ("8m", &["--write-log 8 MiB", "at least 64 MiB are needed"][..]),
        ("2t", &["--write-log 2 TiB", "too many"]),
        ("much", &["--write-log 'much' is not a size"]),
    ] {
        let (code, message) = format(size);
        assert_eq!(code, Some(2), "{message}");
        has(&message, words);
        assert!(!cache.exists(), "{size}: something was made");
    }
    for placement in ["sparse", "sparse:1g"] {
        let path = cache.to_str().unwrap();
        let size = ["--size", "256m", "--write-log", "64m", "--placement", placement];
        let (code, message) = larder(&[&["format", path][..], &size].concat());
        assert!(code == Some(2) && !cache.exists(), "{message}");
        has(&message, &["--placement sparse", "no place for a write log", "set:W"]);
    }
    let (code, message) = format("127m");
    assert!(code == Some(2) && !cache.exists(), "{message}");
    has(&message, &["--size 128 MiB less --write-log 127 MiB", "1 MiB are too few"]);
    let (code, message) = format("64m");
    assert_eq!(code, Some(0), "{message}");
    let (code, message) = larder(&["check", cache.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{message}");
}

//! Traces that are empty, cut short, damaged, something else, or cut within their compression: every format, by the commands.

#[path = "../../../trace/tests/samples/mod.rs"]
mod samples;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use larder_base::Rng;
use larder_trace::Format;
use samples::samples;

fn stats(file: &Path, format: Format, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["trace", "stats", "--json", "--format", format.name()])
        .args(more)
        .arg(file)
        .output()
        .unwrap()
}

/// The one line that was said, after checking that it is one, and that nothing was printed as a result.
fn refusal(output: &Output, code: i32, case: &str) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{case}: {said}");
    assert!(said.starts_with("larder: ") && said.lines().count() == 1, "{case}: {said}");
    assert!(output.stdout.is_empty(), "{case}: a result was printed");
    said
}

#[derive(Clone, Copy, Debug)]
enum Damage {
    Empty,
    /// The last record is a word, or lacks its end.
    Cut,
    /// The first byte is another one.
    Signature,
    /// Random bytes; an odd number of them, so that they are no whole number of records.
    Noise,
}

fn damaged(damage: Damage, format: Format, bytes: &[u8]) -> Vec<u8> {
    match damage {
        Damage::Empty => Vec::new(),
        Damage::Cut if bytes.contains(&0) => bytes[..bytes.len() - 5].to_vec(),
        Damage::Cut => {
            let end = bytes[..bytes.len() - 1].iter().rposition(|&b| b == b'\n');
            // Lines of other kinds are passed over in these two: theirs end too soon.
            let last: &[u8] = match format {
                Format::Etw => b"DiskWrite, 20, a",
                Format::BlkParse => b"8,16 3 6 1.5 3645 Q WS 16",
                _ => b"rubbish",
            };
            [&bytes[..end.map_or(0, |n| n + 1)], last].concat()
        }
        Damage::Signature => [&[bytes[0] ^ 0x55], &bytes[1..]].concat(),
        Damage::Noise => {
            let mut rng = Rng::new(4099);
            (0..4099).map(|_| rng.next_u64() as u8).collect()
        }
    }
}

/// Where damage is not an error: any line is a key of `txt`, any first byte part of a number where there is no signature (nor
/// in that byte of a blktrace, its version, or of an lcs, which is told by its header as a whole).
fn is_legal(damage: Damage, format: Format) -> bool {
    match damage {
        Damage::Empty => false,
        Damage::Cut | Damage::Noise => format == Format::Txt,
        Damage::Signature => !matches!(
            format,
            Format::Larder
                | Format::CacheLib
                | Format::Mooncake
                | Format::Thesios
                | Format::IoLog
                | Format::Srt
        ),
    }
}

#[test]
fn damaged_traces_are_refused_with_one_line_or_counted() {
    let dir = tempfile::tempdir().unwrap();
    for (format, _, bytes, _) in samples() {
        for damage in [Damage::Empty, Damage::Cut, Damage::Signature, Damage::Noise] {
            let case = format!("{format} {damage:?}");
            let file = dir.path().join(case.replace(' ', "-"));
            std::fs::write(&file, damaged(damage, format, &bytes)).unwrap();
            let output = stats(&file, format, &[]);
            if is_legal(damage, format) {
                assert!(matches!(output.status.code(), Some(0 | 1)), "{case}: {output:?}");
                continue;
            }
            // What a csv's columns mean is told from its header: without one it is a matter of arguments.
            let untold = format == Format::Csv && !matches!(damage, Damage::Cut);
            let said = refusal(&output, if untold { 2 } else { 1 }, &case);
            assert!(said.contains(&file.display().to_string()), "{case}: {said}");
            if untold {
                assert!(said.contains("cannot tell the format"), "{case}: {said}");
                continue;
            }
            let place = ["line ", "byte "].iter().any(|p| said.contains(p));
            assert!(place && said.contains("expected ") && said.contains("found "), "{said}");
            assert!(said.contains(format.name()), "{said}");
            // What passing over records would not mend does not advise it.
            let nothing = said.contains("expected a request,");
            assert_eq!(said.contains("--skip-bad"), !nothing, "{said}");

            let output = stats(&file, format, &["--skip-bad"]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!said.contains("--skip-bad"), "{case}: {said}");
            // Nothing but bad records is no trace, and has no figures.
            if output.status.code() == Some(1) {
                let said = refusal(&output, 1, &case);
                assert!(said.contains("expected a request, found "), "{case}: {said}");
                if matches!(damage, Damage::Cut) {
                    // A sample of a single record.
                    assert!(said.contains("passed over: 1, the first, "), "{case}: {said}");
                }
                continue;
            }
            assert!(output.status.success(), "{case} --skip-bad: {said}");
            let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let skipped = json["skipped"].as_u64().unwrap();
            match damage {
                Damage::Cut => assert_eq!(skipped, 1, "{case}: {said}"),
                Damage::Signature | Damage::Noise => {
                    assert!(skipped > 0 && json["requests"] != 0, "{case}: {json}");
                    assert!(said.contains("passed over; the first: "), "{case}: {said}");
                }
                Damage::Empty => panic!("{case}: figures of nothing: {json}"),
            }
        }
    }
}

/// An archive that ends too soon is no bad record: what is left of it cannot be told, with or without `--skip-bad`.
#[test]
fn archives_that_were_cut_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng::new(5);
    let lines: String = (0..20_000).map(|t| format!("{t} {} 100\n", rng.next_u64())).collect();
    for packing in ["gz", "xz", "zst"] {
        let file = dir.path().join(format!("cut.{packing}"));
        let packed = match packing {
            "gz" => {
                let mut w = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                w.write_all(lines.as_bytes()).unwrap();
                w.finish().unwrap()
            }
            "xz" => {
                let mut w = liblzma::write::XzEncoder::new(Vec::new(), 1);
                w.write_all(lines.as_bytes()).unwrap();
                w.finish().unwrap()
            }
            _ => zstd::encode_all(lines.as_bytes(), 1).unwrap(),
        };
        for (name, bytes) in [
            ("half", packed[..packed.len() / 2].to_vec()),
            ("its last bytes missing", packed[..packed.len() - 3].to_vec()),
            ("its start alone", packed[..8].to_vec()),
        ] {
            std::fs::write(&file, bytes).unwrap();
            for more in [&[][..], &["--skip-bad"]] {
                let case = format!("{packing}, {name} {more:?}");
                let said = refusal(&stats(&file, Format::WebCacheSim, more), 1, &case);
                assert!(said.contains(&file.display().to_string()), "{case}: {said}");
                assert!(said.contains("at byte ") && said.contains("decompressed"), "{said}");
            }
        }
        // Damage in the middle: noticed by the archive's checks or by the reader; never taken for the trace.
        let mut bad = packed.clone();
        let at = bad.len() / 2;
        bad[at..at + 64].fill(0xa5);
        std::fs::write(&file, bad).unwrap();
        refusal(&stats(&file, Format::WebCacheSim, &[]), 1, packing);
    }
}

/// A line that never ends is refused as soon as that is known.
#[test]
fn a_line_without_an_end_ends_the_run() {
    for format in [Format::Txt, Format::Msr, Format::Mooncake] {
        let said = refusal(&stats(Path::new("/dev/zero"), format, &[]), 1, format.name());
        assert!(
            said.contains("/dev/zero, line 1: expected a line of at most 4194304 bytes"),
            "{said}"
        );
    }
}

/// Every simulation of a trace tells what was passed over, and makes no figures of nothing.
#[test]
fn simulations_tell_what_was_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.csv");
    let sims: &[&[&str]] = &[
        &["mrc", "--sizes", "10"],
        &["baseline", "--flash", "4m"],
        &["block", "--sizes", "4m"],
        &["stack", "--ram", "1m", "--flash", "0", "--architecture", "naive"],
    ];
    let line =
        |time: u64| format!("{},hm,0,Write,{},4096,413\n", 128166372003061629 + time, time * 4096);
    let good: String = (0..100).map(line).collect();
    for sim in sims {
        let run = |text: &str| {
            std::fs::write(&file, text).unwrap();
            Command::new(env!("CARGO_BIN_EXE_larder"))
                .args(["sim", sim[0]])
                .args(&sim[1..])
                .args(["--format", "msr", "--skip-bad"])
                .arg(&file)
                .output()
                .unwrap()
        };
        let output = run(&format!("{}rubbish\nmore\n{}", line(0), good));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{sim:?}: {said}");
        assert!(
            said.starts_with("larder: 2 malformed records passed over; the first: ")
                && said.contains("line 2: expected ")
                && said.lines().count() == 1,
            "{sim:?}: {said}"
        );
        let said = refusal(&run("rubbish\nmore\n"), 1, sim[0]);
        assert!(
            said.contains("expected a request, found the end of the file, and none in its 2 lines")
                && said.contains("malformed records passed over: 2, the first, line 1: expected "),
            "{sim:?}: {said}"
        );
        let said = refusal(&run(""), 1, sim[0]);
        assert!(said.contains("expected a request, found an empty file"), "{sim:?}: {said}");
    }
}

//! Any text as an experiment: read or refused, in one line; what is read is written and read back the same.
#![no_main]

use larder_sim::experiment::Experiment;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Experiment::parse(text, "fuzzed.toml") {
        Ok(experiment) => {
            let written = toml::to_string(&experiment).expect("an experiment can be written");
            let again = Experiment::parse(&written, "written.toml").expect("what was written");
            assert_eq!(again, experiment);
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
});

//! Import circles between the folders of a crate.
//!
//! Two folders beside each other are in a circle when each leads to the other by imports, through whatever stands beneath or
//! between them. Circles among the files of one folder are that folder's own business, and so is what a folder and the one around
//! it have to do with each other.

use std::collections::{BTreeMap, BTreeSet};

use crate::modules::{ModulePath, Modules};

/// Modules beside each other, and which import which.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// The imports from one folder of a crate to another beside it that are part of a circle, one line each: `kv: server -> config`,
/// with the path of the folder that both are in.
pub(crate) fn in_circles(name: &str, modules: &Modules) -> BTreeSet<String> {
    let mut levels: BTreeMap<ModulePath, Arrows> = BTreeMap::new();
    for from in modules.0.keys() {
        for to in modules.imports(from) {
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            let arrows = levels.entry(from[..common].to_vec()).or_default();
            arrows.entry(from[common].clone()).or_default().insert(to[common].clone());
        }
    }
    let mut found = BTreeSet::new();
    for (around, arrows) in &levels {
        let place: String = around.iter().map(|folder| format!("{folder}/")).collect();
        let is_folder = |module: &str| {
            let path: ModulePath = around.iter().cloned().chain([module.to_owned()]).collect();
            modules.0.get(&path).is_some_and(|m| m.is_folder)
        };
        for (from, to) in arrows.iter().flat_map(|(f, all)| all.iter().map(move |t| (f, t))) {
            if is_folder(from) && is_folder(to) && reached(arrows, to).contains(from) {
                found.insert(format!("{name}: {place}{from} -> {place}{to}"));
            }
        }
    }
    found
}

/// Where imports lead from a module, itself included.
fn reached(arrows: &Arrows, from: &str) -> BTreeSet<String> {
    let mut seen = BTreeSet::from([from.to_owned()]);
    let mut open = vec![from.to_owned()];
    while let Some(at) = open.pop() {
        for to in arrows.get(&at).into_iter().flatten() {
            if seen.insert(to.clone()) {
                open.push(to.clone());
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The circles of a crate with these files.
    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap_or(Path::new(""))).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let modules = Modules::read(&dir.path().join("lib.rs")).unwrap();
        in_circles("x", &modules).into_iter().collect()
    }

    const ROOT: (&str, &str) = ("lib.rs", "mod a; mod b; mod c;");
    const FILES: [(&str, &str); 6] = [
        ("a/mod.rs", "mod x;"),
        ("b/mod.rs", "mod y;"),
        ("c/mod.rs", "mod z;"),
        ("a/x.rs", ""),
        ("b/y.rs", ""),
        ("c/z.rs", ""),
    ];

    /// The circles of three folders, in which these files are others.
    fn with(changed: &[(&'static str, &'static str)]) -> Vec<String> {
        let mut files = vec![ROOT];
        files.extend(FILES);
        for (name, text) in changed {
            files.retain(|(n, _)| n != name);
            files.push((name, text));
        }
        circles(&files)
    }

    const BOTH: [&str; 2] = ["x: a -> b", "x: b -> a"];

    #[test]
    fn arrows_one_way_are_no_circle() {
        assert!(
            with(&[("a/x.rs", "use crate::b::y::Y;"), ("b/y.rs", "use crate::c::Z;")]).is_empty()
        );
    }

    #[test]
    fn a_planted_circle_is_found() {
        assert_eq!(with(&[("a/x.rs", "use crate::b::Y;"), ("b/y.rs", "use crate::a::X;")]), BOTH);
        // In nested groups, renamed, on more than one line.
        let groups = "use crate::{\n    c::Z,\n    b::{y::{self as other, Y}},\n};";
        assert_eq!(with(&[("a/x.rs", groups), ("b/y.rs", "use super::super::a::X;")]), BOTH);
        // Without a `use`: in a type, in an expression, in a macro's call, within a module of the same file.
        for text in [
            "fn f(_: &crate::b::Y) {}",
            "fn f() { crate::b::y::g() }",
            "fn f() { println!(\"{}\", crate::b::y::G) }",
            "mod inner { use super::super::super::b::Y; }",
        ] {
            assert_eq!(
                with(&[("a/x.rs", text), ("b/mod.rs", "mod y; use crate::a::X;")]),
                BOTH,
                "{text}"
            );
        }
    }

    #[test]
    fn a_longer_circle_is_found() {
        assert_eq!(
            with(&[
                ("a/x.rs", "use crate::b::Y;"),
                ("b/y.rs", "use crate::c::Z;"),
                ("c/z.rs", "use crate::a::X;"),
            ]),
            ["x: a -> b", "x: b -> c", "x: c -> a"]
        );
    }

    #[test]
    fn a_circle_behind_a_name_given_on_the_way_is_found() {
        let root = ("lib.rs", "mod a; mod b; mod c; pub use b::y::Y; use self::b as other;");
        for text in ["use crate::Y;", "use crate::other::y::Y;"] {
            assert_eq!(
                with(&[root, ("a/x.rs", text), ("b/y.rs", "use crate::a::X;")]),
                BOTH,
                "{text}"
            );
        }
        // What a folder passes on of another crate is had of that folder.
        let passed = ("b/mod.rs", "mod y; pub use other::Y; use crate::a::X;");
        assert_eq!(with(&[passed, ("a/x.rs", "use crate::b::Y;")]), BOTH);
        // From the folder around it, which has it from the other.
        let around = ("a/mod.rs", "mod x; use crate::b::Y;");
        assert_eq!(
            with(&[around, ("a/x.rs", "use super::Y;"), ("b/y.rs", "use crate::a::X;")]),
            BOTH
        );
    }

    #[test]
    fn a_circle_within_a_folder_is_found_at_its_place() {
        let files = [
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod p; mod q;"),
            ("a/p/mod.rs", "mod r; use super::q::S;"),
            ("a/p/r.rs", ""),
            ("a/q.rs", "mod s; pub use s::S;"),
            ("a/q/s.rs", "use crate::a::p::r::R;"),
        ];
        assert_eq!(circles(&files), ["x: a/p -> a/q", "x: a/q -> a/p"]);
    }

    #[test]
    fn tests_comments_and_words_make_no_circle() {
        let back = ("b/y.rs", "use crate::a::X;");
        for text in [
            "// use crate::b::Y;\n/// See [`crate::b::Y`].\nfn f() {}",
            "const TEXT: &str = \"crate::b::Y\";",
            "#[cfg(test)]\nuse crate::b::{Y};\nfn f() {}",
            "#[cfg(test)]\n#[allow(dead_code)]\nmod tests { use crate::b::Y; }",
            "#[cfg(any(test, feature = \"testing\"))]\nfn f<A, B>(_: A) { crate::b::g() }",
            "struct S { #[cfg(test)] y: crate::b::Y, z: u8 }",
            "#![cfg(test)]\nuse crate::b::Y;",
            "pub(in crate::a) fn f() {}",
        ] {
            assert_eq!(with(&[("a/x.rs", text), back]), [""; 0], "{text}");
        }
        assert!(
            with(&[
                ("a/mod.rs", "mod x; #[cfg(test)] mod t;"),
                ("a/t.rs", "use crate::b::Y;"),
                back
            ])
            .is_empty()
        );
        // What is only left out elsewhere counts.
        for text in [
            "#[cfg(not(test))]\nuse crate::b::Y;",
            "#[cfg(test)]\nuse crate::c::Z;\nuse crate::b::Y;",
            "#[cfg(test)]\nconst fn f() {}\nuse crate::b::Y;",
            "#[cfg(any(test, unix))]\nuse crate::b::Y;",
        ] {
            assert_eq!(with(&[("a/x.rs", text), back]), BOTH, "{text}");
        }
    }

    #[test]
    fn other_crates_of_the_same_name_are_none_of_ours() {
        assert!(with(&[("a/x.rs", "use b::Y;"), ("b/y.rs", "use crate::a::X;")]).is_empty());
        let at = ("c/mod.rs", "#[path = \"odd.rs\"] mod z; use crate::a::X;");
        let files = with(&[at, ("c/odd.rs", ""), ("a/x.rs", "use crate::c::z::Z;")]);
        assert_eq!(files, ["x: a -> c", "x: c -> a"]);
    }
}

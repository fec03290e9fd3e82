//! The modules of a crate as its build sees them: which there are, what each imports, which names it uses.
//!
//! Files are read as tokens, so that what stands in comments and strings is not counted, and what stands in a macro's call is.
//! What only tests are built with is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A module's names from the crate's root on; the root has none.
pub(crate) type ModulePath = Vec<String>;

/// One module, in a file of its own or within another's.
#[derive(Debug, Default)]
pub(crate) struct Module {
    /// Where it stands.
    pub(crate) file: PathBuf,
    /// Other modules have files beneath its own.
    pub(crate) is_folder: bool,
    /// Every name in it, with its count.
    pub(crate) idents: BTreeMap<String, usize>,
    /// Paths as they are written, that begin with `crate`, `self` or `super`, or in a `use`.
    paths: Vec<Vec<String>>,
    /// Names that a `use` gives, and their paths as they are written.
    aliases: BTreeMap<String, Vec<String>>,
}

/// The modules of one crate by path.
#[derive(Debug, Default)]
pub(crate) struct Modules(pub(crate) BTreeMap<ModulePath, Module>);

impl Module {
    /// Whether a `use` takes this name from none of these crates.
    pub(crate) fn is_anothers(&self, name: &str, crates: &[&str]) -> bool {
        let from = self.aliases.get(name).and_then(|path| path.first());
        from.is_some_and(|from| !crates.contains(&from.as_str()))
    }

    /// Names under which a `use` gives what has another name, and that.
    pub(crate) fn renamed(&self) -> impl Iterator<Item = (&str, &str)> {
        let named = self.aliases.iter();
        let named = named.filter_map(|(name, path)| Some((name.as_str(), path.last()?.as_str())));
        named.filter(|(name, last)| name != last && *last != "self")
    }
}

impl Modules {
    /// Reads a crate from its first file (`lib.rs`, `main.rs`) on.
    ///
    /// # Errors
    /// Names the file that cannot be read or is no Rust.
    pub(crate) fn read(first: &Path) -> Result<Modules, String> {
        let mut modules = Modules::default();
        let folder = first.parent().unwrap_or(Path::new("")).to_path_buf();
        modules.file(first, ModulePath::new(), &folder)?;
        Ok(modules)
    }

    /// The modules that a module imports from, itself and those around or beneath it left out.
    pub(crate) fn imports(&self, from: &[String]) -> BTreeSet<ModulePath> {
        let Some(module) = self.0.get(from) else { return BTreeSet::new() };
        let targets = module.paths.iter().filter_map(|path| self.resolve(from, path, 16));
        targets.filter(|to| !to.starts_with(from) && !from.starts_with(to)).collect()
    }

    /// The module that a path written in `from` leads to, through what modules on its way import. `None`: another crate's.
    fn resolve(&self, from: &[String], path: &[String], depth: usize) -> Option<ModulePath> {
        let mut at = from.to_vec();
        let mut rest = path;
        match path.first().map(String::as_str) {
            Some("crate") => {
                at.clear();
                rest = &path[1..];
            }
            Some("self") => rest = &path[1..],
            Some("super") => {}
            Some(name) => {
                let child: ModulePath = from.iter().cloned().chain([name.to_owned()]).collect();
                let imported = self.0.get(from).and_then(|m| m.aliases.get(name));
                if !self.0.contains_key(&child) && imported.is_none_or(|p| p.as_slice() == path) {
                    return None;
                }
            }
            None => return None,
        }
        while rest.first().is_some_and(|name| name == "super") {
            at.pop();
            rest = &rest[1..];
        }
        while let Some((name, further)) = rest.split_first() {
            at.push(name.clone());
            if self.0.contains_key(&at) {
                rest = further;
                continue;
            }
            at.pop();
            let alias = self.0.get(&at).and_then(|module| module.aliases.get(name));
            if let (Some(alias), true) = (alias, depth > 0) {
                let whole: Vec<String> = alias.iter().chain(further).cloned().collect();
                // What another crate has is had here of the module that passes it on.
                return self.resolve(&at, &whole, depth - 1).or(Some(at));
            }
            break;
        }
        Some(at)
    }

    /// Reads a file; `folder` is where the files of its modules are.
    fn file(&mut self, file: &Path, path: ModulePath, folder: &Path) -> Result<(), String> {
        let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
        let tokens: TokenStream =
            text.parse().map_err(|e| format!("{}: is no Rust: {e}", file.display()))?;
        self.module(tokens, file, path, folder)
    }

    fn module(
        &mut self,
        tokens: TokenStream,
        file: &Path,
        path: ModulePath,
        folder: &Path,
    ) -> Result<(), String> {
        let mut scan = Scan::default();
        if !scan.tokens(tokens) {
            return Ok(());
        }
        let mut module = Module { file: file.to_owned(), ..scan.module };
        for (name, body) in scan.children {
            let mut child = path.clone();
            child.push(name.clone());
            let beneath = folder.join(&name);
            match body {
                Body::Here(tokens) => self.module(tokens, file, child, &beneath)?,
                Body::File(given) => {
                    module.is_folder = true;
                    let (flat, deep) = (folder.join(format!("{name}.rs")), beneath.join("mod.rs"));
                    let at_path = given.map(|p| file.parent().unwrap_or(Path::new("")).join(p));
                    let found = at_path.unwrap_or(if deep.is_file() { deep } else { flat });
                    self.file(&found, child, &beneath)?;
                }
            }
        }
        self.0.insert(path, module);
        Ok(())
    }
}

/// Where a module's text is.
enum Body {
    Here(TokenStream),
    /// In a file of its own, with the path that an attribute gives it.
    File(Option<String>),
}

#[derive(Default)]
struct Scan {
    module: Module,
    children: Vec<(String, Body)>,
}

impl Scan {
    /// Takes in tokens. Returns whether they belong to the build: `false` after `#![cfg(test)]`.
    fn tokens(&mut self, tokens: TokenStream) -> bool {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut given = None;
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            match token {
                TokenTree::Punct(p) if p.as_char() == '#' => {
                    let inner = is_punct(tokens.get(at + 1), '!');
                    let Some(TokenTree::Group(attribute)) = tokens.get(at + 1 + usize::from(inner))
                    else {
                        at += 1;
                        continue;
                    };
                    at += 2 + usize::from(inner);
                    if !is_built(attribute.stream()) {
                        if inner {
                            return false;
                        }
                        at = after_item(&tokens, at);
                    } else if let Some(path) = path_of(attribute.stream()) {
                        given = Some(path);
                    }
                }
                TokenTree::Ident(ident) => {
                    let name = ident.to_string();
                    let name = name.strip_prefix("r#").unwrap_or(&name);
                    at = self.ident(name, &tokens, at, &mut given);
                }
                TokenTree::Group(group) => {
                    self.tokens(group.stream());
                    at += 1;
                }
                _ => at += 1,
            }
        }
        true
    }

    /// Takes in a name and what belongs to it. Returns where to go on.
    fn ident(
        &mut self,
        name: &str,
        tokens: &[TokenTree],
        at: usize,
        given: &mut Option<String>,
    ) -> usize {
        match name {
            // The group after it says to whom: no import.
            "pub" => {
                let to_whom = matches!(tokens.get(at + 1), Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Parenthesis);
                at + 1 + usize::from(to_whom)
            }
            "mod" => {
                let Some(TokenTree::Ident(child)) = tokens.get(at + 1) else { return at + 1 };
                let body = match tokens.get(at + 2) {
                    Some(TokenTree::Group(group)) => Body::Here(group.stream()),
                    _ => Body::File(given.take()),
                };
                self.children.push((child.to_string(), body));
                at + 3
            }
            "use" => {
                let end = (at..tokens.len()).find(|&i| is_punct(tokens.get(i), ';'));
                let end = end.unwrap_or(tokens.len());
                self.used(&tokens[at + 1..end], &[]);
                end + 1
            }
            "crate" | "self" | "super" if is_path_separator(tokens, at + 1) => {
                let mut path = vec![name.to_owned()];
                let mut next = at + 1;
                while is_path_separator(tokens, next) {
                    let Some(TokenTree::Ident(ident)) = tokens.get(next + 2) else { break };
                    path.push(ident.to_string());
                    self.count(&ident.to_string());
                    next += 3;
                }
                self.module.paths.push(path);
                next
            }
            _ => {
                self.count(name);
                at + 1
            }
        }
    }

    fn count(&mut self, name: &str) {
        *self.module.idents.entry(name.to_owned()).or_default() += 1;
    }

    /// Takes in the tree of a `use`, what stands before it given.
    fn used(&mut self, tokens: &[TokenTree], before: &[String]) {
        let mut path = before.to_owned();
        let mut name = None;
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            match token {
                TokenTree::Ident(ident) if ident == "as" => {
                    name = tokens.get(at + 1).map(ToString::to_string);
                    at += 1;
                }
                TokenTree::Ident(ident) if ident == "self" && !path.is_empty() => {}
                TokenTree::Ident(ident) => {
                    self.count(&ident.to_string());
                    path.push(ident.to_string());
                }
                TokenTree::Group(group) => {
                    let inside: Vec<TokenTree> = group.stream().into_iter().collect();
                    for leaf in inside.split(|t| is_punct(Some(t), ',')) {
                        if !leaf.is_empty() {
                            self.used(leaf, &path);
                        }
                    }
                    return;
                }
                _ => {}
            }
            at += 1;
        }
        let Some(last) = path.last().cloned() else { return };
        self.module.paths.push(path.clone());
        if !is_punct(tokens.last(), '*') {
            self.module.aliases.insert(name.unwrap_or(last), path);
        }
    }
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(p)) if p.as_char() == wanted)
}

fn is_path_separator(tokens: &[TokenTree], at: usize) -> bool {
    is_punct(tokens.get(at), ':') && is_punct(tokens.get(at + 1), ':')
}

/// The file of `#[path = "…"]`.
fn path_of(attribute: TokenStream) -> Option<String> {
    let tokens: Vec<TokenTree> = attribute.into_iter().collect();
    match tokens.as_slice() {
        [TokenTree::Ident(path), _, TokenTree::Literal(file)] if path == "path" => {
            Some(file.to_string().trim_matches('"').to_owned())
        }
        _ => None,
    }
}

/// Whether what bears an attribute belongs to the product's build. Of what is not known, it does.
fn is_built(attribute: TokenStream) -> bool {
    let tokens: Vec<TokenTree> = attribute.into_iter().collect();
    match tokens.as_slice() {
        [TokenTree::Ident(cfg), TokenTree::Group(condition)] if cfg == "cfg" => {
            let tokens: Vec<TokenTree> = condition.stream().into_iter().collect();
            holds(&tokens) != Some(false)
        }
        _ => true,
    }
}

/// Features that only tests have.
const FOR_TESTS: [&str; 2] = ["\"testing\"", "\"planted\""];

/// Whether a condition of `cfg` holds in the product's build; `None`: it depends.
fn holds(condition: &[TokenTree]) -> Option<bool> {
    let parts = |group: &TokenTree| -> Vec<Option<bool>> {
        let TokenTree::Group(group) = group else { return Vec::new() };
        let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
        let parts = tokens.split(|t| is_punct(Some(t), ',')).filter(|part| !part.is_empty());
        parts.map(holds).collect()
    };
    match condition {
        [TokenTree::Ident(test)] if test == "test" => Some(false),
        [TokenTree::Ident(feature), _, TokenTree::Literal(name)]
            if feature == "feature" && FOR_TESTS.contains(&name.to_string().as_str()) =>
        {
            Some(false)
        }
        [TokenTree::Ident(word), group] => {
            let parts = parts(group);
            let all_are = |value| parts.iter().all(|part| *part == Some(value));
            let one_is = |value| parts.contains(&Some(value));
            match word.to_string().as_str() {
                "not" => parts.first().copied().flatten().map(|holds| !holds),
                "all" if one_is(false) => Some(false),
                "all" if all_are(true) => Some(true),
                "any" if one_is(true) => Some(true),
                "any" if all_are(false) => Some(false),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Where the item, statement, field or arm that begins at `at` ends.
fn after_item(tokens: &[TokenTree], mut at: usize) -> usize {
    // Its other attributes.
    while is_punct(tokens.get(at), '#') {
        at += 2;
    }
    let mut keyword = None;
    while let Some(token) = tokens.get(at) {
        match token {
            TokenTree::Ident(ident) => {
                let word = ident.to_string();
                let ends_at_semicolon =
                    ["use", "const", "static", "let", "type"].contains(&word.as_str());
                let ends_with_body =
                    ["fn", "mod", "struct", "enum", "impl", "trait"].contains(&word.as_str());
                // `const fn` has a body.
                if ends_with_body {
                    keyword = Some(true);
                } else if ends_at_semicolon && keyword.is_none() {
                    keyword = Some(false);
                }
            }
            TokenTree::Punct(p) if p.as_char() == ';' => return at + 1,
            TokenTree::Punct(p) if p.as_char() == ',' && keyword.is_none() => return at + 1,
            TokenTree::Group(g) if g.delimiter() == Delimiter::Brace && keyword != Some(false) => {
                return at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    at
}

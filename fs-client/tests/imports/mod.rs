//! Finds the modules of the crate that each source file names, and checks them against an order.
//!
//! The reader knows just enough of Rust: it skips comments, literals and lifetimes. A path that begins with `crate`, `super` or `self`, in a `use`
//! with its groups, in code, or in `pub(in …)`, is followed to the module below the crate's root that it names. Names in documentation are not
//! imports.

use std::fs;
use std::path::{Path, PathBuf};

/// A module below the crate's root that a file names.
#[derive(Debug, PartialEq, Eq)]
pub struct Named {
    pub line: usize,
    /// The module's name. `*` stands for the root itself, through which everything can be named.
    pub module: String,
}

/// The violations of an order, one line each with file and line number: a module below the root may name only itself and modules before it in
/// `order`. The root (`lib.rs`, `main.rs`) may name everything.
pub fn out_of_order(sources: &Path, order: &[&str]) -> Vec<String> {
    let rank = |module: &str| order.iter().position(|known| *known == module);
    let mut wrong = Vec::new();
    for file in rust_files(sources) {
        let relative = file.strip_prefix(sources).expect("it was found there");
        let path = module_path(relative);
        let Some(own) = path.first() else {
            continue;
        };
        let Some(own_rank) = rank(own) else {
            wrong.push(format!("{}: the order does not say where {own} stands", relative.display()));
            continue;
        };
        let source = fs::read_to_string(&file).expect("a source can be read");
        for Named { line, module } in named(&source, &path) {
            if rank(&module).is_none_or(|rank| rank > own_rank) {
                wrong.push(format!("{}:{line}: {own} names {module}", relative.display()));
            }
        }
    }
    wrong
}

/// All Rust files below a directory, sorted.
pub fn rust_files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory of sources");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let below = |path: PathBuf| match path.is_dir() {
        true => rust_files(&path),
        false if path.extension().is_some_and(|extension| extension == "rs") => vec![path],
        false => Vec::new(),
    };
    paths.into_iter().flat_map(below).collect()
}

/// The module path of a file; empty for the root.
fn module_path(file: &Path) -> Vec<String> {
    let parts = file.with_extension("");
    let mut path: Vec<String> = parts.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if path.len() == 1 && (path[0] == "lib" || path[0] == "main")
        || path.last().is_some_and(|last| last == "mod")
    {
        path.pop();
    }
    path
}

/// The modules that the source of the module at `path` names, with their lines.
pub fn named(source: &str, path: &[String]) -> Vec<Named> {
    let mut reader = Reader { tokens: tokens(source), found: Vec::new() };
    reader.read(path);
    reader.found
}

#[derive(Debug, PartialEq, Eq)]
enum What {
    Word(String),
    /// The token `::`.
    Path,
    Sign(char),
}

#[derive(Debug)]
struct Token {
    line: usize,
    what: What,
}

struct Reader {
    tokens: Vec<Token>,
    found: Vec<Named>,
}

impl Reader {
    fn read(&mut self, path: &[String]) {
        // The modules within the file that are open here, each with its depth of braces.
        let mut inner: Vec<(usize, String)> = Vec::new();
        let mut depth = 0;
        for at in 0..self.tokens.len() {
            match &self.tokens[at].what {
                What::Sign('{') => {
                    if let (Some("mod"), Some(name)) = (self.word_before(at, 2), self.word_before(at, 1)) {
                        inner.push((depth, name.to_owned()));
                    }
                    depth += 1;
                }
                What::Sign('}') => {
                    depth -= 1;
                    inner.retain(|(opened_at, _)| *opened_at < depth);
                }
                What::Word(word) if !self.is_path(at.wrapping_sub(1)) => {
                    let mut here = path.to_vec();
                    here.extend(inner.iter().map(|(_, name)| name.clone()));
                    match word.as_str() {
                        "crate" => self.follow(at, Vec::new()),
                        "super" => {
                            here.pop();
                            self.follow(at, here);
                        }
                        "self" => self.follow(at, here),
                        _ => {}
                    }
                }
                _ => {}
            }
        }
    }

    fn word_before(&self, at: usize, distance: usize) -> Option<&str> {
        match &self.tokens[at.checked_sub(distance)?].what {
            What::Word(word) => Some(word),
            _ => None,
        }
    }

    fn is_path(&self, at: usize) -> bool {
        self.tokens.get(at).is_some_and(|token| token.what == What::Path)
    }

    /// The word at `at` means the module `base`: follows the path behind it.
    fn follow(&mut self, at: usize, base: Vec<String>) {
        let is_renamed =
            matches!(self.tokens.get(at + 1), Some(Token { what: What::Word(word), .. }) if word == "as");
        if self.is_path(at + 1) {
            self.tree(at + 2, base);
        } else if is_renamed && base.is_empty() {
            self.note(at, "*");
        }
    }

    /// Reads a tree of paths, as in a `use`, that begins at `at` in the module `base`.
    fn tree(&mut self, at: usize, mut base: Vec<String>) {
        match self.tokens.get(at).map(|token| &token.what) {
            Some(What::Word(word)) if word == "super" => {
                base.pop();
                self.follow(at, base);
            }
            Some(What::Word(word)) if word == "self" => self.follow(at, base),
            Some(What::Word(word)) if base.is_empty() => {
                let word = word.clone();
                self.note(at, &word);
            }
            Some(What::Sign('*')) if base.is_empty() => self.note(at, "*"),
            Some(What::Sign('{')) => {
                let mut depth = 0;
                for next in at.. {
                    match self.tokens.get(next).map(|token| &token.what) {
                        None => return,
                        Some(What::Sign('{')) => {
                            depth += 1;
                            if depth == 1 {
                                self.tree(next + 1, base.clone());
                            }
                        }
                        Some(What::Sign('}')) if depth == 1 => return,
                        Some(What::Sign('}')) => depth -= 1,
                        Some(What::Sign(',')) if depth == 1 => self.tree(next + 1, base.clone()),
                        Some(_) => {}
                    }
                }
            }
            _ => {}
        }
    }

    fn note(&mut self, at: usize, module: &str) {
        self.found.push(Named { line: self.tokens[at].line, module: module.to_owned() });
    }
}

/// The words and signs of a source, without comments and literals.
fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let (mut tokens, mut line, mut at) = (Vec::new(), 1, 0);
    while let Some(&char) = chars.get(at) {
        let rest = &chars[at..];
        let len = match char {
            '/' if rest.starts_with(&['/', '/']) => length_until(rest, |rest| rest[0] == '\n'),
            '/' if rest.starts_with(&['/', '*']) => block_comment(rest),
            '"' => string(rest),
            '\'' => quote(rest),
            _ if char.is_alphabetic() || char == '_' => {
                let len = length_until(rest, |rest| !(rest[0].is_alphanumeric() || rest[0] == '_'));
                let word: String = rest[..len].iter().collect();
                match raw_string(&word, &rest[len..]) {
                    Some(literal) => len + literal,
                    None => {
                        tokens.push(Token { line, what: What::Word(word) });
                        len
                    }
                }
            }
            ':' if rest.starts_with(&[':', ':']) => {
                tokens.push(Token { line, what: What::Path });
                2
            }
            _ => {
                if !char.is_whitespace() && !char.is_numeric() {
                    tokens.push(Token { line, what: What::Sign(char) });
                }
                1
            }
        };
        line += rest[..len].iter().filter(|char| **char == '\n').count();
        at += len;
    }
    tokens
}

fn length_until(rest: &[char], is_end: impl Fn(&[char]) -> bool) -> usize {
    (0..rest.len()).find(|at| is_end(&rest[*at..])).unwrap_or(rest.len())
}

fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(&['/', '*']) {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(&['*', '/']) {
            depth -= 1;
            at += 2;
        } else {
            at += 1;
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn string(rest: &[char]) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != '"' {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// The length of a character literal, or of the quote of a lifetime.
fn quote(rest: &[char]) -> usize {
    match rest.get(1..3) {
        Some(['\\', _]) => 3 + length_until(&rest[3..], |rest| rest[0] == '\'') + 1,
        Some([_, '\'']) => 3,
        _ => 1,
    }
}

/// The length of a raw string or raw identifier after its prefix.
fn raw_string(prefix: &str, rest: &[char]) -> Option<usize> {
    let hashes = length_until(rest, |rest| rest[0] != '#');
    if !matches!(prefix, "r" | "br" | "cr") || rest.get(hashes) != Some(&'"') {
        return None;
    }
    let end: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let body = length_until(&rest[hashes + 1..], |rest| rest.starts_with(&end));
    Some(hashes + 1 + body + end.len())
}

//! What it costs on this machine to pass a flag or a cache line from core to core: built in, or as `symmem calibrate`
//! measured it and left it in a file.
//!
//! The file is text, one name and one value per line: a version, the processor, then every cost in picoseconds. One
//! that is damaged, of another version or of another processor is ignored: costs are a matter of speed alone.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Where the file is, if not in the user's cache.
const VARIABLE: &str = "SYMMEM_COSTS";
const VERSION: &str = "2";
/// More than a file of costs ever has.
const MOST_BYTES: u64 = 4096;

/// What a rank pays, in picoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// All ranks tell each other that they are there: whatever their number.
    pub exchange: u32,
    /// The same: more for each of them.
    pub flag: u32,
    /// Ranks that share a core hand it on.
    pub switch: u32,
    /// A line is written that peers have read the last time.
    pub staged: u32,
    /// A line is read that a peer has only just written.
    pub fresh: u32,
    /// A line is read that a peer has written a while ago.
    pub settled: u32,
    /// A line of a peer is read and written back in a stream of such.
    pub moved: u32,
}

impl Costs {
    /// Those of two cores that share no cache but the last. What counts is where the algorithms cross, and that moves
    /// little where all costs scale with the way between two cores.
    pub const BUILT_IN: Self = Self {
        exchange: 80_000,
        flag: 10_000,
        switch: 1_000_000,
        staged: 2_000,
        fresh: 4_000,
        settled: 3_000,
        moved: 3_000,
    };

    const NAMES: [&str; 7] = ["exchange", "flag", "switch", "staged", "fresh", "settled", "moved"];

    /// Each with its name.
    pub fn named(&self) -> [(&'static str, u32); 7] {
        let Self { exchange, flag, switch, staged, fresh, settled, moved } = *self;
        let values = [exchange, flag, switch, staged, fresh, settled, moved];
        std::array::from_fn(|i| (Self::NAMES[i], values[i]))
    }

    fn from_values([exchange, flag, switch, staged, fresh, settled, moved]: [u32; 7]) -> Self {
        Self { exchange, flag, switch, staged, fresh, settled, moved }
    }

    /// Those of this machine. The file is read once; later callers get the same.
    pub(crate) fn here() -> Self {
        static FOUND: OnceLock<Costs> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let InUse { costs, origin } = InUse::find();
            if let Origin::Ignored(path, why) = origin {
                tracing::warn!("{} is ignored: {why}", path.display());
            }
            costs
        })
    }

    /// What a rank pays in a group of `ranks` on `cores`.
    pub(crate) fn among(&self, ranks: usize, cores: usize) -> Rates {
        let (ranks, cores) = (ranks as u64, cores.max(1) as u64);
        let Self { exchange, flag, switch, staged, fresh, settled, moved } = *self;
        let saturated = |cost: u64| u32::try_from(cost).unwrap_or(u32::MAX);
        if ranks <= cores {
            let exchange = u64::from(exchange) + ranks.saturating_mul(flag.into());
            return Rates::from_words([saturated(exchange), staged, fresh, settled, moved]);
        }
        // Beyond the cores every rank of a core has to be let run once, and peers' copies of a line go while others
        // run: a rank finds its staging as if nobody had read it lately.
        let exchange = ranks.div_ceil(cores).saturating_mul(switch.into());
        Rates::from_words([saturated(exchange), staged.min(settled), fresh, settled, moved])
    }

    /// What a rank pays in a group that spans hosts, with so many ranks on a host of `cores`. A line is moved when it crosses.
    pub(crate) fn between_hosts(&self, per_host: usize, ranks: usize, cores: usize) -> Rates {
        const FIRST: u64 = 5_500_000;
        const MORE: u64 = 1_500_000;
        const LINE: u32 = 20_000;
        let far = ranks.saturating_sub(per_host) as u64;
        let near = self.among(per_host, cores).exchange;
        let exchange = FIRST.saturating_add(far.saturating_mul(MORE)).saturating_add(near);
        let exchange = u32::try_from(exchange).unwrap_or(u32::MAX);
        Rates::from_words([exchange, self.staged, LINE, LINE, LINE])
    }

    /// Writes the file, all of it or nothing.
    pub fn write(&self, path: &Path) -> Result<()> {
        let failed = |what: &str| Error::system(format!("{what} {}", path.display()));
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).map_err(failed("making the directory of"))?;
        }
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{}", std::process::id()));
        let written = std::fs::write(&temporary, self.text(&processor()));
        let written = written.and_then(|()| std::fs::rename(&temporary, path));
        written.map_err(|error| {
            let _ = std::fs::remove_file(&temporary); // it may not even be there
            failed("writing")(error)
        })
    }

    fn text(&self, processor: &str) -> String {
        let costs = self.named().map(|(name, cost)| format!("{name} {cost}\n")).concat();
        format!(
            "# Picoseconds, by symmem calibrate.\nversion {VERSION}\nprocessor {processor}\n{costs}"
        )
    }

    fn parse(text: &str, processor: &str) -> Result<Self, String> {
        let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
        let mut entries = lines.map(|line| line.split_once(' ').unwrap_or((line, "")));
        match entries.next() {
            Some(("version", VERSION)) => {}
            Some(("version", other)) => return Err(format!("it is of version {other:?}")),
            _ => return Err("it does not begin with a version".into()),
        }
        match entries.next() {
            Some(("processor", name)) if name == processor => {}
            Some(("processor", name)) => {
                return Err(format!("it is of another processor, {name}; this is {processor}"));
            }
            _ => return Err("it names no processor".into()),
        }
        let mut values = [None; 7];
        for (name, value) in entries {
            let place = Self::NAMES.iter().position(|known| *known == name);
            let place = place.and_then(|i| values.get_mut(i)).filter(|place| place.is_none());
            let place = place.ok_or_else(|| format!("{name:?} is no cost, or is there twice"))?;
            let value = value.trim().parse::<u32>();
            *place = Some(value.map_err(|e| format!("{name} is no number of picoseconds: {e}"))?);
        }
        match values.iter().position(Option::is_none) {
            Some(missing) => Err(format!("{} is missing", Self::NAMES[missing])),
            None => Ok(Self::from_values(values.map(Option::unwrap_or_default))),
        }
    }
}

/// What a rank pays in one group, in picoseconds. All ranks plan with those that rank 0 found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rates {
    /// All ranks tell each other that they are there.
    pub(crate) exchange: u64,
    pub(crate) staged: u64,
    pub(crate) fresh: u64,
    pub(crate) settled: u64,
    pub(crate) moved: u64,
}

impl Rates {
    pub(crate) const WORDS: usize = 5;

    pub(crate) fn from_words(words: [u32; Self::WORDS]) -> Self {
        let [exchange, staged, fresh, settled, moved] = words.map(u64::from);
        Self { exchange, staged, fresh, settled, moved }
    }

    pub(crate) fn words(&self) -> [u32; Self::WORDS] {
        let Self { exchange, staged, fresh, settled, moved } = *self;
        // They came from words.
        [exchange, staged, fresh, settled, moved]
            .map(|cost| u32::try_from(cost).unwrap_or(u32::MAX))
    }
}

/// Where costs are from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// There is no file.
    BuiltIn,
    /// Measured on this machine.
    File(PathBuf),
    /// There is a file, and why it is not taken: the costs are the built-in ones.
    Ignored(PathBuf, String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn => write!(f, "built in; symmem calibrate measures those of this machine"),
            Self::File(path) => write!(f, "measured, from {}", path.display()),
            Self::Ignored(path, why) => {
                write!(f, "built in; {} is ignored: {why}", path.display())
            }
        }
    }
}

/// The costs that this process would plan with, and where they are from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InUse {
    /// The costs.
    pub costs: Costs,
    /// Where they are from.
    pub origin: Origin,
}

impl InUse {
    /// Looks at the file, if there is one.
    pub fn find() -> Self {
        match path() {
            Some(path) => Self::at(path, &processor()),
            None => Self { costs: Costs::BUILT_IN, origin: Origin::BuiltIn },
        }
    }

    fn at(path: PathBuf, processor: &str) -> Self {
        let (costs, origin) = match read(&path) {
            Ok(None) => (Costs::BUILT_IN, Origin::BuiltIn),
            Ok(Some(text)) => match Costs::parse(&text, processor) {
                Ok(costs) => (costs, Origin::File(path)),
                Err(why) => (Costs::BUILT_IN, Origin::Ignored(path, why)),
            },
            Err(why) => (Costs::BUILT_IN, Origin::Ignored(path, why)),
        };
        Self { costs, origin }
    }
}

/// What is in the file, if there is one.
fn read(path: &Path) -> Result<Option<String>, String> {
    match path.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        // Opening a pipe would wait for its other end.
        Ok(found) if !found.is_file() => return Err("it is no file".into()),
        Ok(found) if found.len() > MOST_BYTES => return Err("it is too long".into()),
        _ => {}
    }
    let mut text = String::new();
    let file = File::open(path).map_err(|e| e.to_string())?;
    file.take(MOST_BYTES).read_to_string(&mut text).map_err(|e| e.to_string())?;
    Ok(Some(text))
}

/// Where the costs of this machine are kept: `SYMMEM_COSTS`, or in the user's cache, if there is one.
pub fn path() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set(VARIABLE).or_else(|| {
        let cache = set("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let cache = cache.or_else(|| Some(set("HOME")?.join(".cache")));
        Some(cache?.join("symmem").join("costs"))
    })
}

/// What the kernel calls the processor: the name alone is the same for many on virtual machines.
fn processor() -> String {
    const PARTS: [&str; 5] = ["model name", "cpu family", "model", "CPU implementer", "CPU part"];
    let Ok(info) = File::open("/proc/cpuinfo") else { return "unknown".into() };
    let lines = BufReader::new(info).lines().map_while(|l| l.ok().filter(|l| !l.is_empty()));
    let first: Vec<String> = lines.collect();
    let part = |name: &&str| {
        let mut fields = first.iter().filter_map(|line| line.split_once(':'));
        fields.find(|(field, _)| field.trim() == *name).map(|(_, value)| value.trim())
    };
    let parts: Vec<&str> = PARTS.iter().filter_map(part).collect();
    if parts.is_empty() { "unknown".into() } else { parts.join("/") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: &str = "Processor of Mine/25/17";
    const OTHER: Costs = Costs { staged: 7_500, switch: 2_000_000, ..Costs::BUILT_IN };

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(Costs::parse(&OTHER.text(MINE), MINE), Ok(OTHER));
    }

    #[test]
    fn a_file_of_another_processor_or_version_is_refused() {
        let text = OTHER.text(MINE);
        let why = Costs::parse(&text, "Another").unwrap_err();
        assert_eq!(why, format!("it is of another processor, {MINE}; this is Another"));
        let text = text.replace("version 2", "version 3");
        assert_eq!(Costs::parse(&text, MINE).unwrap_err(), "it is of version \"3\"");
    }

    #[test]
    fn a_damaged_file_is_refused_whatever_the_damage() {
        let whole = OTHER.text(MINE);
        for (from, to, why) in [
            ("version 2\n", "", "it does not begin with a version"),
            ("processor", "process", "it names no processor"),
            ("staged 7500\n", "", "staged is missing"),
            ("staged 7500", "staged", "staged is no number of picoseconds"),
            ("staged 7500", "staged -1", "staged is no number of picoseconds"),
            ("staged 7500", "staged 4294967296", "staged is no number of picoseconds"),
            ("staged 7500", "fresh 7500", "\"fresh\" is no cost, or is there twice"),
            ("staged 7500", "staged 7500\nluck 1", "\"luck\" is no cost"),
        ] {
            let said = Costs::parse(&whole.replace(from, to), MINE).unwrap_err();
            assert!(said.contains(why), "{said} for {to:?} in place of {from:?}");
        }
        let body = whole.rfind("moved").unwrap();
        let cut = (0..body).find(|&end| Costs::parse(&whole[..end], MINE).is_ok());
        assert_eq!(cut, None, "a part of a file was taken for a whole one");
        assert!(Costs::parse("", MINE).is_err());
    }

    #[test]
    fn files_are_read_where_there_are_any_and_never_an_error() {
        let directory = std::env::temp_dir().join(format!("symmem-costs-{}", std::process::id()));
        let path = directory.join("deep").join("costs");
        assert_eq!(InUse::at(path.clone(), MINE).origin, Origin::BuiltIn);
        OTHER.write(&path).unwrap();
        let found = InUse::at(path.clone(), &processor());
        assert_eq!(found, InUse { costs: OTHER, origin: Origin::File(path.clone()) });
        let ignored = |path: &Path| {
            let found = InUse::at(path.to_owned(), MINE);
            found.costs == Costs::BUILT_IN && matches!(found.origin, Origin::Ignored(..))
        };
        assert!(ignored(&path) && ignored(&directory));
        let left: Vec<_> = path.parent().unwrap().read_dir().unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        for bytes in [vec![0xff; 8], vec![b'x'; 1 << 20]] {
            std::fs::write(&path, bytes).unwrap();
            assert!(ignored(&path));
        }
        assert!(OTHER.write(&path.join("below a file")).is_err());
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn ranks_beyond_the_cores_wait_their_turn() {
        let costs = Costs::BUILT_IN;
        assert_eq!(costs.among(2, 2).exchange, 100_000);
        let oversubscribed = costs.among(5, 2);
        assert_eq!(
            (oversubscribed.exchange, oversubscribed.staged, oversubscribed.fresh),
            (3_000_000, 2_000, 4_000)
        );
        assert_eq!(costs.among(usize::MAX, 1).exchange, u64::from(u32::MAX));
        let rates = costs.among(2, 2);
        assert_eq!(Rates::from_words(rates.words()), rates);
    }
}

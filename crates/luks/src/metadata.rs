//! The JSON part of a LUKS2 header (specification section 3), in types that accept only what vmseal writes.
//! All of it is checked before any key derivation runs and before libcryptsetup sees it.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::{Refusal, json, quote};
use crate::facts::{DATA_OFFSET, FORMAT_VERSION, Facts, ROLE_VERSION, SHARED_VERSION};
use crate::layout::{AREA_LEN, JSON_LEN, SLOTS_LEN, SLOTS_OFFSET};
use crate::token::{TYPE, Token};

/// The most key slots: two, during a change of key.
pub(crate) const SLOTS_MAX: usize = 2;

/// The most entries of any JSON object that is keyed by numbers; bounds what is kept in memory.
const ENTRIES_MAX: usize = 32;

/// The iterations of PBKDF2 that vmseal asks for: the least that LUKS2 allows, as a KEK is random.
pub(crate) const ITERATIONS: u32 = 1000;

/// The most iterations that are run for a header: cryptsetup's own minimum may rise.
const ITERATIONS_MAX: u64 = 10_000;

/// The stripes of the anti-forensic splitter: what LUKS2 has always used.
pub(crate) const STRIPES: u64 = 4000;

/// The length of a salt, in bytes: what LUKS2 has always used.
const SALT_LEN: usize = 32;

/// The length of the digest of a key, in bytes: a SHA-256.
const DIGEST_LEN: usize = 32;

/// An object keyed by number, as in LUKS2. A repeated key is an error: parsers differ in which value they
/// use, and libcryptsetup's differs from ours.
struct Numbered<T>(BTreeMap<u32, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Numbered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Numbered<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an object of at most {ENTRIES_MAX} numbered entries")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let number = decimal(&key)
                        .and_then(|number| u32::try_from(number).ok())
                        .ok_or_else(|| A::Error::custom("an entry is not numbered"))?;
                    if entries.insert(number, map.next_value()?).is_some() {
                        return Err(A::Error::custom(format!("entry {number} comes twice")));
                    }
                    if entries.len() > ENTRIES_MAX {
                        return Err(A::Error::custom("too many entries"));
                    }
                }
                Ok(Numbered(entries))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Json {
    keyslots: Numbered<Keyslot>,
    tokens: Numbered<Token>,
    segments: Numbered<Segment>,
    digests: Numbered<Digest>,
    config: Config,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keyslot {
    #[serde(rename = "type")]
    kind: String,
    key_size: u64,
    af: Splitter,
    area: Area,
    kdf: Kdf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Splitter {
    #[serde(rename = "type")]
    kind: String,
    stripes: u64,
    hash: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Area {
    #[serde(rename = "type")]
    kind: String,
    offset: String,
    size: String,
    encryption: String,
    key_size: u64,
}

/// The parameters of PBKDF2; those of Argon2 are read only so that it can be refused by name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Kdf {
    #[serde(rename = "type")]
    kind: String,
    hash: Option<String>,
    iterations: Option<u64>,
    time: Option<u64>,
    memory: Option<u64>,
    cpus: Option<u64>,
    salt: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Segment {
    #[serde(rename = "type")]
    kind: String,
    offset: String,
    size: String,
    iv_tweak: String,
    encryption: String,
    sector_size: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Digest {
    #[serde(rename = "type")]
    kind: String,
    keyslots: Vec<String>,
    segments: Vec<String>,
    hash: String,
    iterations: u64,
    salt: String,
    digest: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    json_size: String,
    keyslots_size: String,
    #[serde(default)]
    requirements: Requirements,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Requirements {
    #[serde(default)]
    mandatory: Vec<String>,
}

/// The offsets of the key slots' areas, and how the key of each follows from its KEK.
type Slots = (BTreeMap<u32, u64>, BTreeMap<u32, Derivation>);

/// How a key is derived by PBKDF2 with SHA-256.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Derivation {
    pub(crate) salt: [u8; SALT_LEN],
    pub(crate) iterations: NonZeroU32,
}

/// What tells whether a key is the DEK.
#[derive(Debug)]
pub(crate) struct KeyDigest {
    pub(crate) derivation: Derivation,
    pub(crate) value: [u8; DIGEST_LEN],
}

/// What is needed of a header once it has been checked.
#[derive(Debug)]
pub(crate) struct Metadata {
    /// The key slots, with the offsets of their areas; one or two, none overlapping.
    pub(crate) areas: BTreeMap<u32, u64>,
    /// How the key of each area follows from its KEK.
    pub(crate) derivations: BTreeMap<u32, Derivation>,
    pub(crate) digest: KeyDigest,
    /// The tokens by the slot each is for: one per slot, or none at all.
    pub(crate) tokens: BTreeMap<u32, Token>,
}

/// A number as LUKS2 writes it in a string: decimal digits, no sign, no leading zero.
fn decimal(text: &str) -> Option<u64> {
    let canonical = text == "0" || !text.starts_with('0');
    let digits = text.bytes().all(|c| c.is_ascii_digit());
    if canonical && digits { text.parse().ok() } else { None }
}

fn expect(field: &'static str, found: &str, expected: &str) -> Result<(), Refusal> {
    if found == expected {
        return Ok(());
    }
    Err(Refusal::Field { field, found: quote(found), expected: quote(expected) })
}

fn expect_number(field: &'static str, found: u64, expected: u64) -> Result<(), Refusal> {
    if found == expected {
        return Ok(());
    }
    Err(Refusal::Field { field, found: found.to_string(), expected: expected.to_string() })
}

impl Metadata {
    /// Parses the JSON part of a copy and checks everything that is the same for every disk. `facts` are the
    /// expected values of the segment.
    pub(crate) fn parse(json_area: &[u8], facts: &Facts) -> Result<Self, Refusal> {
        let json = Self::read(json_area)?;
        check_config(&json.config)?;
        check_segment(&json.segments.0, facts)?;
        let (areas, derivations) = check_slots(&json.keyslots.0, facts)?;
        let digest = check_digest(&json.digests.0, &areas)?;
        let tokens = check_tokens(json.tokens.0, &areas)?;
        Ok(Self { areas, derivations, digest, tokens })
    }

    /// The tokens alone, for a header that is only inspected.
    pub(crate) fn tokens(json_area: &[u8]) -> Result<Vec<Token>, Refusal> {
        Ok(Self::read(json_area)?.tokens.0.into_values().collect())
    }

    fn read(json_area: &[u8]) -> Result<Json, Refusal> {
        let end = json_area.iter().position(|byte| *byte == 0);
        let end = end.ok_or_else(|| Refusal::Json("it fills its area to the end".to_owned()))?;
        if json_area[end..].iter().any(|byte| *byte != 0) {
            return Err(Refusal::Json("there is something behind its end".to_owned()));
        }
        // Checked by name before the types: a header of a later cryptsetup announces itself like this.
        if let Ok(probe) = serde_json::from_slice::<RequirementsProbe>(&json_area[..end])
            && let Some(name) = probe.config.requirements.mandatory.first()
        {
            return Err(Refusal::Requirement(quote(name)));
        }
        // Likewise a token whose version explains why it has unknown fields.
        if let Ok(probe) = serde_json::from_slice::<VersionProbe>(&json_area[..end])
            && let Some(token) =
                probe.tokens.0.values().find(|token| token.kind == TYPE && !is_known(token.version))
        {
            return Err(Refusal::TokenVersion(token.version));
        }
        serde_json::from_slice(&json_area[..end]).map_err(|error| json(&error))
    }
}

/// The JSON of a header without key slots, with the room for key slots and the place of the data that all disks have.
pub(crate) fn widened(json_area: &[u8]) -> Result<Vec<u8>, Refusal> {
    let end = json_area.iter().position(|byte| *byte == 0).unwrap_or(json_area.len());
    let value = serde_json::from_slice::<serde_json::Value>(&json_area[..end]);
    let mut value = value.map_err(|error| json(&error))?;
    value["config"]["keyslots_size"] = SLOTS_LEN.to_string().into();
    value["segments"]["0"]["offset"] = DATA_OFFSET.to_string().into();
    serde_json::to_vec(&value).map_err(|error| json(&error))
}

fn is_known(version: u64) -> bool {
    [FORMAT_VERSION, SHARED_VERSION, ROLE_VERSION].map(u64::from).contains(&version)
}

#[derive(Deserialize)]
struct RequirementsProbe {
    config: ConfigProbe,
}

#[derive(Deserialize)]
struct ConfigProbe {
    requirements: Requirements,
}

#[derive(Deserialize)]
struct VersionProbe {
    tokens: Numbered<TokenProbe>,
}

#[derive(Deserialize)]
struct TokenProbe {
    #[serde(rename = "type")]
    kind: String,
    version: u64,
}

fn check_config(config: &Config) -> Result<(), Refusal> {
    if let Some(name) = config.requirements.mandatory.first() {
        return Err(Refusal::Requirement(quote(name)));
    }
    expect("config.json_size", &config.json_size, &JSON_LEN.to_string())?;
    expect("config.keyslots_size", &config.keyslots_size, &SLOTS_LEN.to_string())
}

fn check_segment(segments: &BTreeMap<u32, Segment>, facts: &Facts) -> Result<(), Refusal> {
    let (1, Some(segment)) = (segments.len(), segments.get(&0)) else {
        return Err(Refusal::Segments(segments.len()));
    };
    expect("segment.type", &segment.kind, "crypt")?;
    if segment.encryption != facts.cipher {
        let (found, expected) = (quote(&segment.encryption), quote(&facts.cipher));
        return Err(Refusal::Cipher { found, expected });
    }
    match decimal(&segment.offset) {
        Some(found) if found == facts.data_offset => {}
        Some(found) => return Err(Refusal::Offset { found, expected: facts.data_offset }),
        None => expect("segment.offset", &segment.offset, &facts.data_offset.to_string())?,
    }
    if segment.sector_size != u64::from(facts.sector_size) {
        let (found, expected) = (segment.sector_size, facts.sector_size);
        return Err(Refusal::SectorSize { found, expected });
    }
    expect("segment.size", &segment.size, "dynamic")?;
    expect("segment.iv_tweak", &segment.iv_tweak, "0")
}

fn check_slots(slots: &BTreeMap<u32, Keyslot>, facts: &Facts) -> Result<Slots, Refusal> {
    if slots.is_empty() || slots.len() > SLOTS_MAX {
        return Err(Refusal::Field {
            field: "the number of key slots",
            found: slots.len().to_string(),
            expected: "1 or 2".to_owned(),
        });
    }
    let mut areas = BTreeMap::<u32, u64>::new();
    let mut derivations = BTreeMap::new();
    for (number, slot) in slots {
        derivations.insert(*number, check_kdf(&slot.kdf)?);
        let key_len = u64::from(facts.key_bits / 8);
        expect("keyslot.type", &slot.kind, "luks2")?;
        expect_number("keyslot.key_size", slot.key_size, key_len)?;
        expect("keyslot.af.type", &slot.af.kind, "luks1")?;
        expect_number("keyslot.af.stripes", slot.af.stripes, STRIPES)?;
        expect("keyslot.af.hash", &slot.af.hash, "sha256")?;
        expect("keyslot.area.type", &slot.area.kind, "raw")?;
        expect("keyslot.area.encryption", &slot.area.encryption, "aes-xts-plain64")?;
        expect_number("keyslot.area.key_size", slot.area.key_size, 64)?;
        expect("keyslot.area.size", &slot.area.size, &AREA_LEN.to_string())?;
        let offset = decimal(&slot.area.offset)
            .filter(|offset| area_offsets().contains(offset))
            .filter(|offset| !areas.values().any(|taken| taken == offset))
            .ok_or_else(|| Refusal::Field {
                field: "keyslot.area.offset",
                found: quote(&slot.area.offset),
                expected: "one of vmseal's two areas".to_owned(),
            })?;
        areas.insert(*number, offset);
    }
    Ok((areas, derivations))
}

/// The offsets of key slots: the first two areas that libcryptsetup allocates.
pub(crate) fn area_offsets() -> [u64; SLOTS_MAX] {
    [SLOTS_OFFSET, SLOTS_OFFSET + AREA_LEN]
}

/// Bytes of a fixed length in base64.
fn bytes<const LEN: usize>(field: &'static str, text: &str) -> Result<[u8; LEN], Refusal> {
    let decoded = STANDARD.decode(text).ok().and_then(|bytes| bytes.try_into().ok());
    decoded.ok_or_else(|| Refusal::Field {
        field,
        found: quote(text),
        expected: format!("{LEN} bytes in base64"),
    })
}

/// The number of iterations, where so many are run.
fn iterations(found: u64) -> Option<NonZeroU32> {
    u32::try_from(found).ok().filter(|_| found <= ITERATIONS_MAX).and_then(NonZeroU32::new)
}

fn check_kdf(kdf: &Kdf) -> Result<Derivation, Refusal> {
    let limit = || format!("pbkdf2 with sha256 and {ITERATIONS_MAX} iterations");
    let refuse = |found: String| Err(Refusal::Kdf { place: "a key slot", found, limit: limit() });
    if kdf.kind != "pbkdf2" {
        let cost = |name: &str, value: Option<u64>| {
            value.map_or(String::new(), |value| format!(", {name} {value}"))
        };
        return refuse(format!(
            "{}{}{}{}",
            quote(&kdf.kind),
            cost("time", kdf.time),
            cost("memory", kdf.memory),
            cost("cpus", kdf.cpus)
        ));
    }
    let (Some(hash), Some(found)) = (kdf.hash.as_deref(), kdf.iterations) else {
        return refuse("pbkdf2 with incomplete parameters".to_owned());
    };
    match (hash, iterations(found), kdf.time, kdf.memory, kdf.cpus) {
        ("sha256", Some(iterations), None, None, None) => {
            Ok(Derivation { salt: bytes("keyslot.kdf.salt", &kdf.salt)?, iterations })
        }
        _ => refuse(format!("pbkdf2 with {} and {found} iterations", quote(hash))),
    }
}

fn check_digest(
    digests: &BTreeMap<u32, Digest>,
    areas: &BTreeMap<u32, u64>,
) -> Result<KeyDigest, Refusal> {
    let (1, Some(digest)) = (digests.len(), digests.get(&0)) else {
        return Err(Refusal::Field {
            field: "the number of digests",
            found: digests.len().to_string(),
            expected: "1".to_owned(),
        });
    };
    expect("digest.type", &digest.kind, "pbkdf2")?;
    let iterations = iterations(digest.iterations);
    let Some(iterations) = iterations.filter(|_| digest.hash == "sha256") else {
        return Err(Refusal::Kdf {
            place: "the digest",
            found: format!(
                "pbkdf2 with {} and {} iterations",
                quote(&digest.hash),
                digest.iterations
            ),
            limit: format!("pbkdf2 with sha256 and {ITERATIONS_MAX} iterations"),
        });
    };
    let mut slots: Vec<&str> = digest.keyslots.iter().map(String::as_str).collect();
    slots.sort_unstable();

    let mut expected: Vec<String> = areas.keys().map(u32::to_string).collect();
    expected.sort_unstable();
    expect("digest.keyslots", &slots.join(","), &expected.join(","))?;
    expect("digest.segments", &digest.segments.join(","), "0")?;
    let salt = bytes("digest.salt", &digest.salt)?;
    let value = bytes("digest.digest", &digest.digest)?;
    Ok(KeyDigest { derivation: Derivation { salt, iterations }, value })
}

fn check_tokens(
    tokens: BTreeMap<u32, Token>,
    areas: &BTreeMap<u32, u64>,
) -> Result<BTreeMap<u32, Token>, Refusal> {
    for (slot, token) in &tokens {
        expect("token.type", &token.kind, TYPE)?;
        expect("token.keyslots", &token.keyslots.join(","), &slot.to_string())?;
        expect_number("token.version", token.version, token.right_version().into())?;
    }
    // Each key slot has the token of the same number; cryptsetup makes none at all.
    if !tokens.is_empty() && tokens.keys().ne(areas.keys()) {
        return Err(Refusal::Field {
            field: "the number of tokens",
            found: tokens.len().to_string(),
            expected: areas.len().to_string(),
        });
    }
    Ok(tokens)
}

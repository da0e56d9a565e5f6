//! Sizes in bytes, as people type them. `20G` means 20 GiB, as it does to QEMU and virsh.

/// The binary units, smallest first.
const UNITS: [char; 5] = ['k', 'm', 'g', 't', 'p'];

/// Reads a size: a number with a unit. K, M, G, T and P, with or without `iB`, are powers of 1024; with `B` alone
/// (`20GB`), powers of 1000. A number without a unit is in bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = |why: &str| {
        Err(format!(
            "'{text}' is not a size{why}; give one such as 20G or 512MiB (powers of 1024), 20GB (of 1000), or bytes"
        ))
    };
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let Some(factor) = factor(&unit.trim_start().to_ascii_lowercase()) else {
        return wrong(": its unit is unknown");
    };
    let bytes = match number.split_once('.') {
        None => number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)),
        Some(_) => number.parse::<f64>().ok().map(|number| number * factor as f64).and_then(whole),
    };
    match bytes {
        Some(bytes) => Ok(bytes),
        None => wrong(""),
    }
}

/// Whole bytes of a fraction of a unit.
fn whole(bytes: f64) -> Option<u64> {
    (bytes.is_finite() && bytes < u64::MAX as f64).then_some(bytes as u64)
}

/// The bytes of a unit in lower case.
fn factor(unit: &str) -> Option<u64> {
    let mut letters = unit.chars();
    let first = match letters.next() {
        None | Some('b') if letters.as_str().is_empty() => return Some(1),
        first => first?,
    };
    let power = u32::try_from(UNITS.iter().position(|&known| known == first)? + 1).ok()?;
    match letters.as_str() {
        "" | "ib" => 1024u64.checked_pow(power),
        "b" => 1000u64.checked_pow(power),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_binary_unless_they_say_otherwise() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4096B", 4096),
            ("1k", 1 << 10),
            ("1024M", 1 << 30),
            ("20G", 20 << 30),
            ("20g", 20 << 30),
            ("20GiB", 20 << 30),
            ("20 gib", 20 << 30),
            ("20GB", 20_000_000_000),
            ("1.5G", 3 << 29),
            ("62T", 62 << 40),
            ("2PiB", 2 << 50),
            ("0", 0),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_examples() {
        for text in
            ["", "G", "lots", "-1", "1..5G", "20GX", "20Gi", "20 000", "99999999999P", "1e3"]
        {
            let why = parse_size(text).unwrap_err();
            assert!(why.contains("20G or 512MiB"), "{text}: {why}");
        }
    }
}

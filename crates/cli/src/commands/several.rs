//! VMs that a command names, several at a time.

use std::collections::HashSet;
use std::hash::Hash;

use vmseal_api::client::ServerClient;
use vmseal_api::model::Vm;

/// The VMs that are named, each of them once: the same one may be named by its name and by its id. Of several names the server
/// is asked which VMs they are.
pub async fn each_once(server: &ServerClient, named: Vec<String>) -> anyhow::Result<Vec<String>> {
    let named = first_of_each(named.into_iter().map(|name| (name.clone(), name)));
    if named.len() < 2 {
        return Ok(named);
    }
    let mut known = Vec::with_capacity(named.len());
    for name in named {
        let vm: Vm = server.get(&format!("vms/{name}")).await?;
        known.push((vm.id, name));
    }
    Ok(first_of_each(known))
}

/// The first name of each thing.
fn first_of_each<K: Eq + Hash>(named: impl IntoIterator<Item = (K, String)>) -> Vec<String> {
    let mut seen = HashSet::new();
    named.into_iter().filter_map(|(thing, name)| seen.insert(thing).then_some(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_two_names_is_taken_by_the_first() {
        let named = [(1, "web"), (2, "db"), (1, "0192"), (2, "db"), (3, "mail")];
        let named = named.map(|(thing, name)| (thing, name.to_owned()));
        assert_eq!(first_of_each(named), ["web", "db", "mail"]);
    }
}
